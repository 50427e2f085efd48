"""What a model's config.json says of its size: parameters, bytes of KV, work per token.

Legend: T tokens, E hidden size, H query heads, K KV heads, D head size, I MLP size, V vocabulary.
Sizes follow from the shapes of the published architectures; norms and biases are left out (under
0.1% of a model). All layers are taken to be alike, but for their attention windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ConfigError
from octavo.core.hf_config import text_config

_PLAIN_MLP = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "phi")
_TIED = ("gpt2", "opt", "gemma", "gemma2", "gemma3_text")  # where config.json need not say so
_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}


def bits(dtype: str) -> int:
    """Bits of an element, by Octavo's name of its type."""
    return _BITS[dtype]


@dataclass(frozen=True)
class ModelSize:
    """attention_params, mlp_params: of one layer, those that one token uses; expert_params: of one
    expert, of which a layer has num_experts and a token uses experts_per_token (0: no experts).
    window: of the num_windowed layers that have one. weight_bits: of the layers' matrices;
    other_bits: of the embedding and the head. kv_bits: of cached keys and values."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    attention_params: int
    mlp_params: int
    expert_params: int
    num_experts: int
    experts_per_token: int
    tied: bool
    num_windowed: int
    window: int | None
    weight_bits: int
    other_bits: int
    kv_bits: int

    @property
    def active_params(self) -> int:
        """Parameters of the layers that one token is multiplied with."""
        experts = self.experts_per_token * self.expert_params
        return self.num_layers * (self.attention_params + self.mlp_params + experts)

    @property
    def layer_params(self) -> int:
        """Parameters of all layers."""
        experts = self.num_experts * self.expert_params
        return self.num_layers * (self.attention_params + self.mlp_params + experts)

    @property
    def head_params(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def num_parameters(self) -> int:
        return self.layer_params + self.head_params * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        others = self.head_params * (1 if self.tied else 2)
        return (self.layer_params * self.weight_bits + others * self.other_bits) // 8

    @property
    def kv_bytes_per_token(self) -> int:
        """In all layers, keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_size * self.kv_bits // 8

    def read_bytes(self, num_tokens: int) -> float:
        """Bytes of the layers' weights that a step of T tokens reads. Of the experts, those that
        some token is expected to use when tokens choose evenly and independently."""
        params = self.num_layers * (self.attention_params + self.mlp_params)
        if self.num_experts:
            untouched = (1 - self.experts_per_token / self.num_experts) ** num_tokens
            params += int(self.num_layers * self.num_experts * self.expert_params * (1 - untouched))
        return params * self.weight_bits / 8


def model_size(
    config: Mapping[str, Any], dtype: str, kv_dtype: str, quantization: str = "none"
) -> ModelSize:
    """The size of the model that config.json describes. quantization: Octavo's name of the method
    that holds the layers' matrices; what the checkpoint itself says goes first. Raises
    `ConfigError` naming the key that is missing."""
    text = text_config(config)
    if text.get("kv_lora_rank"):
        raise ConfigError(
            "latent attention (kv_lora_rank) has no cost model here: fit one from a run",
            path="executor.kind.model",
        )
    hidden = _need(text, "hidden_size", "n_embd")
    heads = _need(text, "num_attention_heads", "n_head")
    layers = _need(text, "num_hidden_layers", "n_layer")
    head_size = _get(text, "head_dim") or hidden // heads
    kv_heads = _get(text, "num_key_value_heads") or heads
    num_windowed, window = _windows(text, layers)
    experts = _get(text, "num_local_experts", "num_experts", "n_routed_experts")
    inner = _get(text, "intermediate_size", "n_inner", "ffn_dim") or 4 * hidden
    matrices = 2 if text.get("model_type") in _PLAIN_MLP else 3
    expert = matrices * hidden * (_get(text, "moe_intermediate_size") or inner) if experts else 0
    shared = _get(text, "shared_expert_intermediate_size")
    shared = shared or _get(text, "n_shared_experts") * _get(text, "moe_intermediate_size")
    mlp = matrices * hidden * (shared if experts else inner) + hidden * experts
    return ModelSize(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=_need(text, "vocab_size"),
        attention_params=2 * hidden * head_size * (heads + kv_heads),
        mlp_params=mlp,
        expert_params=expert,
        num_experts=experts,
        experts_per_token=_need(text, "num_experts_per_tok") if experts else 0,
        tied=bool(text.get("tie_word_embeddings", text.get("model_type") in _TIED)),
        num_windowed=num_windowed,
        window=window,
        weight_bits=_weight_bits(config, dtype, quantization),
        other_bits=bits(dtype),
        kv_bits=bits(kv_dtype),
    )


def _get(text: Mapping[str, Any], *keys: str) -> int:
    for key in keys:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _need(text: Mapping[str, Any], *keys: str) -> int:
    value = _get(text, *keys)
    if not value:
        raise ConfigError(
            f"the model's config lacks {' or '.join(keys)}, expected a positive number",
            path="executor.kind.model",
        )
    return value


def _windows(text: Mapping[str, Any], layers: int) -> tuple[int, int | None]:
    """How many layers attend within a window, and the window."""
    window = _get(text, "sliding_window")
    if not window or text.get("use_sliding_window") is False:
        return 0, None
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind == "sliding_attention" for kind in kinds), window
    return layers, window


def _weight_bits(config: Mapping[str, Any], dtype: str, quantization: str) -> int:
    section = config.get("quantization_config") or text_config(config).get("quantization_config")
    if isinstance(section, Mapping):
        own = section.get("bits")
        if isinstance(own, int):
            return own
        if "fp8" in str(section.get("quant_method")):
            return 8
    return _BITS.get(quantization, bits(dtype))
