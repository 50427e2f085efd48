"""The native kernels inside whole engines: right for every family, and bit for bit reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.core.errors import PluginUnavailable

OUTPUT = 6
SHAPE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}


def _family(name: str) -> Any:
    import transformers

    torch.manual_seed(0)
    change: dict[str, Any] = {
        "Llama": {"attention_bias": True, "mlp_bias": True},
        "Mistral": {"sliding_window": 24, "head_dim": 16},
        "Qwen2": {"tie_word_embeddings": True},
        "Qwen3": {"head_dim": 32},
    }[name]
    config = getattr(transformers, f"{name}Config")(**(SHAPE | change))
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for name_, parameter in model.named_parameters():
        if (
            name_.endswith("bias") or "norm" in name_
        ):  # fresh ones are 0 and 1, which hides mistakes
            torch.nn.init.normal_(parameter.data, mean=1.0 if "norm" in name_ else 0.0, std=0.2)
    return model


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with tiny random models, by family."""
    from tokenizers import Tokenizer, models

    found = {}
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(160)}, unk_token="w0"))
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        found[name] = tmp_path_factory.mktemp(name)
        _family(name).save_pretrained(found[name])
        words.save(str(found[name] / "tokenizer.json"))
    return found


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(3)
    base = generator.integers(3, 160, 70).tolist()
    return [base[:1], base[:16], base[:33], base[:70], generator.integers(3, 160, 45).tolist()]


def run(
    folder: Path,
    prompts: list[list[int]],
    *,
    quantization: str = "packed",
    attention: str = "cpu",
    runner: str = "native",
    dtype: str = "float32",
    together: bool = True,
    threads: int = 1,
    max_tokens: int = OUTPUT,
    **scheduler: Any,
) -> list[tuple[list[int], np.ndarray]]:
    """(tokens, logprobs float32[n, V]) of each prompt, greedy."""
    kv_cache = {"num_blocks": scheduler.pop("num_blocks", 200)}
    for ours, theirs in (("block_size", "block_size"), ("kv_dtype", "dtype")):
        if ours in scheduler:
            kv_cache[theirs] = scheduler.pop(ours)
    llm = LLM(
        config={
            "model": {"source": str(folder), "dtype": dtype, "quantization": quantization},
            "attention": {"backend": attention},
            "graph": {"runner": runner},
            "kv_cache": kv_cache,
            "executor": {"num_threads": threads},
            "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 256} | scheduler,
        }
    )
    try:
        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=160, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        batches = [inputs] if together else [[item] for item in inputs]
        outputs = [o for batch in batches for o in llm.generate(batch, params, use_tqdm=False)]
    finally:
        llm.close()
    found = []
    for output in outputs:
        choice = output.outputs[0]
        values = [[row[token].logprob for token in range(160)] for row in choice.logprobs]
        found.append((list(choice.token_ids), np.array(values, np.float32)))
    return found


@pytest.fixture(scope="session")
def reference(folders: dict[str, Path], prompts: list[list[int]]) -> dict[str, Any]:
    """Answers of the torch operators, in float32."""
    plain = {"quantization": "none", "attention": "torch", "runner": "eager"}
    return {name: run(folder, prompts, **plain) for name, folder in folders.items()}


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
@pytest.mark.parametrize("runner", ["native", "eager"])
def test_every_family_answers_as_torch_does(
    folders: dict[str, Path],
    prompts: list[list[int]],
    reference: dict[str, Any],
    family: str,
    runner: str,
) -> None:
    found = run(folders[family], prompts, runner=runner, threads=2)
    for (tokens, values), (wanted, expected) in zip(found, reference[family], strict=True):
        assert tokens == wanted
        assert np.abs(values - expected).max() < 2e-4


@pytest.mark.parametrize(("quantization", "limit"), [("int8", 0.25), ("int4", 2.5)])
def test_quantized_answers_are_near(
    folders: dict[str, Path],
    prompts: list[list[int]],
    reference: dict[str, Any],
    quantization: str,
    limit: float,
) -> None:
    """Logprobs of the first token, whose context is the same; random weights are a hard case."""
    for family, folder in folders.items():
        found = run(folder, prompts, quantization=quantization, max_tokens=1)
        for (_, values), (_, expected) in zip(found, reference[family], strict=True):
            assert np.abs(values[0] - expected[0]).mean() < limit


def test_bfloat16_weights(
    folders: dict[str, Path], prompts: list[list[int]], reference: Any
) -> None:
    """bfloat16 weights and KV cache with float32 between them stay near float32."""
    found = run(folders["Llama"], prompts, dtype="bfloat16", max_tokens=1)
    for (_, values), (_, expected) in zip(found, reference["Llama"], strict=True):
        assert np.abs(values[0] - expected[0]).mean() < 0.15


@pytest.mark.parametrize("quantization", ["packed", "int8", "int4"])
@pytest.mark.parametrize("family", ["Mistral", "Qwen3"])
def test_no_circumstance_changes_a_bit(
    folders: dict[str, Path], prompts: list[list[int]], quantization: str, family: str
) -> None:
    """Alone, together, twice (prefix hits), in chunks, preempted, on more threads."""
    folder = folders[family]
    alone = run(folder, prompts, quantization=quantization, together=False)
    for what in (
        {},
        {"threads": 3},
        {"max_num_batched_tokens": 9},
        {"max_chunk_tokens": 7, "block_size": 8},
        {"num_blocks": 8},
    ):
        found = run(folder, prompts + prompts, quantization=quantization, **what)
        for (tokens, values), (wanted, expected) in zip(found, alone + alone, strict=True):
            assert tokens == wanted, what
            assert np.array_equal(values, expected), what


@pytest.mark.parametrize(("kv_dtype", "limit"), [("fp8", 0.5), ("int8", 0.1)])
def test_an_eight_bit_kv_cache(
    folders: dict[str, Path],
    prompts: list[list[int]],
    reference: dict[str, Any],
    kv_dtype: str,
    limit: float,
) -> None:
    found = run(folders["Llama"], prompts, kv_dtype=kv_dtype, max_tokens=1)
    for (_, values), (_, expected) in zip(found, reference["Llama"], strict=True):
        assert 0 < np.abs(values[0] - expected[0]).mean() < limit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quantization": "none"}, "needs packed weights"),
        ({"attention": "torch"}, "needs attention backend cpu, this is torch"),
    ],
)
def test_what_it_needs_is_said(
    folders: dict[str, Path], change: dict[str, str], reason: str
) -> None:
    with pytest.raises(PluginUnavailable, match=reason):
        run(folders["Llama"], [[1]], **change)
