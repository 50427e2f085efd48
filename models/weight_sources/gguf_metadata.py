"""The metadata of a GGUF file, and config.json and generation_config.json made from it.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. No torch.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.errors import ModelError, UnsupportedModel, WeightError, nearest
from octavo.models.weight_sources.gguf_format import read_gguf

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


class GGUF:
    """An opened file: `metadata` by key, `tensors` by name. Raises `WeightError` for a damaged file
    and `UnsupportedModel` for an architecture that is not converted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata, self.tensors = read_gguf(path)
        self.architecture = str(self.get("general.architecture", ""))
        if self.architecture not in ARCHITECTURES:
            known = nearest(self.architecture, ARCHITECTURES)
            raise UnsupportedModel(f"{path}: GGUF architecture '{self.architecture}': {known}")
        if int(self.get("split.count", 0)) > 1:
            raise UnsupportedModel(
                f"{path}: one of {self.get('split.count')} parts; merge them (llama-gguf-split "
                "--merge) into one file"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        return self.metadata.get(key, default)

    def own(self, key: str, default: Any = None) -> Any:
        """A value under the architecture's name, such as `llama.block_count`. A list is taken when
        all layers agree. Raises `WeightError` when it is needed and absent."""
        name = f"{self.architecture}.{key}"
        value = self.get(name, default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModel(f"{self.path}: {name} differs by layer, which is not served")
            value = value[0]
        if value is None:
            raise WeightError(f"{self.path}: the metadata lack '{name}'")
        # Floats are stored in 32 bits: 1e-5 would come back as 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value


def make_config(file: GGUF) -> dict[str, Any]:
    """config.json in the spelling of transformers 5."""
    architecture = ARCHITECTURES[file.architecture]
    if file.own("expert_count", 0):
        raise UnsupportedModel(f"{file.path}: mixture-of-experts GGUF files are not converted")
    hidden, heads = int(file.own("embedding_length")), int(file.own("attention.head_count"))
    context = int(file.own("context_length"))
    head_size = int(
        file.own("attention.key_length", file.own("rope.dimension_count", hidden // heads))
    )
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": file.architecture,
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0])
        if "token_embd.weight" in file.tensors
        else len(file.get("tokenizer.ggml.tokens", [])),
        "hidden_size": hidden,
        "intermediate_size": int(file.own("feed_forward_length")),
        "num_hidden_layers": int(file.own("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.own("attention.head_count_kv", heads)),
        "head_dim": head_size,
        "max_position_embeddings": context,
        "rms_norm_eps": float(file.own("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "rope_parameters": _rope(file, head_size, context),
        "dtype": _dtype(file),
    }
    window = int(file.own("attention.sliding_window", 0))
    if architecture == "LlamaForCausalLM" and 0 < window < context:
        # llama.cpp files Mistral under llama; the window is all that sets them apart.
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = window
    for name, token in _special_ids(file).items():
        config[name] = token
    return config


def make_generation_config(file: GGUF) -> dict[str, Any]:
    """End tokens: of sequence, of turn and of message, where the file has them."""
    ids = _special_ids(file)
    ends = [ids.get("eos_token_id")]
    ends += [file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    unique = list(dict.fromkeys(int(end) for end in ends if end is not None))
    found: dict[str, Any] = {key: item for key, item in ids.items() if key != "eos_token_id"}
    if unique:
        found["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return found


def _special_ids(file: GGUF) -> dict[str, int]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: file.get(f"tokenizer.ggml.{name}_token_id") for key, name in names.items()}
    return {key: int(token) for key, token in found.items() if token is not None}


def _dtype(file: GGUF) -> str:
    """That of the matrices. Quantized weights say nothing: bfloat16 holds any range."""
    kinds = {t.kind for t in file.tensors.values() if len(t.shape) == 2}
    for kind, name in (("F32", "float32"), ("F16", "float16")):
        if kinds and kinds <= {kind, "F32"}:
            return name
    return "bfloat16"


def _rope(file: GGUF, head_size: int, context: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": float(file.own("rope.freq_base", 10000.0))}
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3(file, rope["rope_theta"], head_size)
    kind = file.own("rope.scaling.type", "none")
    if kind == "none":
        return rope | {"rope_type": "default"}
    rope |= {"rope_type": kind, "factor": float(file.own("rope.scaling.factor"))}
    if kind == "yarn":
        original = int(file.own("rope.scaling.original_context_length", context))
        rope["original_max_position_embeddings"] = original
        sharpened = float(file.own("rope.scaling.attn_factor", 1.0))
        if sharpened != 1.0:
            rope["attention_factor"] = sharpened * (0.1 * math.log(rope["factor"]) + 1.0)
    elif kind != "linear":
        raise UnsupportedModel(f"{file.path}: rope scaling of type '{kind}' is not converted")
    return rope


def _llama3(file: GGUF, theta: float, head_size: int) -> dict[str, Any]:
    """The parameters of Llama 3.1's scaling, found from the divisors of the frequencies that the
    file holds in their place."""
    divisors = file.tensors["rope_freqs.weight"].data.view(np.float32).astype(np.float64)
    frequencies = theta ** -(np.arange(0, head_size, 2) / head_size)
    factor, low, high = round(float(divisors.max()), 4), 1.0, 4.0
    for original in (8192, 2048, 4096, 16384, 32768, 65536, 131072):
        turns = original * frequencies / (2 * np.pi)
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
        expected = 1.0 / (kept + (1.0 - kept) / factor)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": original,
            }
    raise ModelError(f"{file.path}: the tensor rope_freqs.weight is of no known rope scaling")
