"""From a config.json of the Llama-like families to `DecoderConfig`. Imports no torch.

Two spellings of rope are read: `rope_scaling` beside `rope_theta` (transformers 4), and
`rope_parameters`, which holds both (transformers 5). A key that is absent has the default of the
family's configuration class in transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts import Availability, ProbeContext
from octavo.core.contracts.model import AttentionSpec
from octavo.core.errors import ModelError, UnsupportedModel, nearest
from octavo.models.layers.rope_config import ROPE_TYPES, RopeConfig


@dataclass(frozen=True)
class Family:
    """What a family does whatever config.json says. `attention_bias`: of q, k and v; None means
    that the key `attention_bias` decides, for o as well. `max_positions`, `num_kv_heads`,
    `head_size`, `window`: defaults (None: as many KV heads as heads, hidden size over heads, no
    window). `layered_window`: whether `use_sliding_window` and `layer_types` are read."""

    attention_bias: bool | None
    mlp_bias: bool
    qk_norm: bool
    max_positions: int
    num_kv_heads: int | None = None
    head_size: int | None = None
    window: int | None = None
    layered_window: bool = False


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(None, mlp_bias=True, qk_norm=False, max_positions=2048),
    "MistralForCausalLM": Family(
        False, mlp_bias=False, qk_norm=False, max_positions=131072, num_kv_heads=8, window=4096
    ),
    "Qwen2ForCausalLM": Family(
        True,
        mlp_bias=False,
        qk_norm=False,
        max_positions=32768,
        num_kv_heads=32,
        window=4096,
        layered_window=True,
    ),
    "Qwen3ForCausalLM": Family(
        None,
        mlp_bias=False,
        qk_norm=True,
        max_positions=32768,
        num_kv_heads=32,
        head_size=128,
        window=4096,
        layered_window=True,
    ),
}


@dataclass(frozen=True)
class DecoderConfig:
    """Everything `Decoder` needs. windows: one a layer, None for full attention."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]

    def attention_spec(self, layer: int, max_model_len: int) -> AttentionSpec:
        """The layer's attention. A window that no sequence can exceed is none."""
        window = self.windows[layer]
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            value_head_size=self.head_size,
            scale=self.head_size**-0.5,
            window=None if window is None or window >= max_model_len else window,
            rope_dim=self.rope.dim,
        )


def tensor_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint, by its Hugging Face name."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_size
    query, keys = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    matrices = (
        ("self_attn.q_proj", (query, hidden), config.qkv_bias),
        ("self_attn.k_proj", (keys, hidden), config.qkv_bias),
        ("self_attn.v_proj", (keys, hidden), config.qkv_bias),
        ("self_attn.o_proj", (hidden, query), config.output_bias),
        ("mlp.gate_proj", (inner, hidden), config.mlp_bias),
        ("mlp.up_proj", (inner, hidden), config.mlp_bias),
        ("mlp.down_proj", (hidden, inner), config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        for name, shape, bias in matrices:
            shapes[f"{prefix}.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (size,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (size,)
    return shapes


def decoder_config(config: Mapping[str, Any]) -> DecoderConfig:
    """Read config.json. Raises `UnsupportedModel` for what this decoder does not compute, and
    `ModelError` for a key that is missing or invalid."""
    architecture = (list(config.get("architectures") or ()) or ["(none)"])[0]
    if architecture not in FAMILIES:
        known = nearest(architecture, FAMILIES)
        raise UnsupportedModel(f"architecture '{architecture}' has no implementation: {known}")
    family = FAMILIES[architecture]
    activation = config.get("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"config.json: hidden_act '{activation}' is not served, only 'silu'")
    hidden_size = _size(config, "hidden_size")
    num_heads = _size(config, "num_attention_heads")
    head_size = _size(config, "head_dim", family.head_size or hidden_size // num_heads)
    num_kv_heads = _size(config, "num_key_value_heads", family.num_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})"
        )
    num_layers = _size(config, "num_hidden_layers")
    declared_bias = bool(config.get("attention_bias", False))
    bias = declared_bias if family.attention_bias is None else family.attention_bias
    return DecoderConfig(
        architecture=architecture,
        vocab_size=_size(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        qkv_bias=bias,
        output_bias=bias and family.attention_bias is None,
        mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=_rope(
            config, head_size, _size(config, "max_position_embeddings", family.max_positions)
        ),
        windows=_windows(config, family, num_layers),
    )


def probe(context: ProbeContext) -> Availability:
    """Whether the model's architecture and configuration are served."""
    architecture = context.facts.get("architecture")
    if architecture is not None and architecture not in FAMILIES:
        return Availability(False, f"serves {', '.join(FAMILIES)}, not {architecture}")
    config = context.facts.get("config")
    if config is None:
        return Availability(True)
    try:
        decoder_config(config)
    except ModelError as error:
        return Availability(False, str(error))
    return Availability(True, f"serves {architecture}" if architecture else "")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _rope(config: Mapping[str, Any], head_size: int, max_positions: int) -> RopeConfig:
    given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise UnsupportedModel(
            f"config.json: rope of type '{kind}' is not served, {nearest(kind, ROPE_TYPES)}"
        )
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModel("config.json: rope parameters that differ by layer are not served")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor {partial} is not served, only 1.0"
        )
    if head_size % 2:
        raise ModelError(f"config.json: head_dim must be even for rope, got {head_size}")
    # A value beside the rope parameters goes before one inside them, as in transformers.
    original = config.get("original_max_position_embeddings")
    if original is not None:
        given["original_max_position_embeddings"] = original
    given.setdefault("original_max_position_embeddings", max_positions)
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    return RopeConfig(kind, float(theta), head_size, max_positions, given)


def _windows(config: Mapping[str, Any], family: Family, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", family.window)
    if family.window is None or not window:
        return (None,) * num_layers
    if not family.layered_window:
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = config.get("max_window_layers", 28)
        return tuple(int(window) if layer >= first else None for layer in range(num_layers))
    if len(layer_types) < num_layers:
        raise ModelError(
            f"config.json: layer_types must have {num_layers} entries, got {len(layer_types)}"
        )
    unknown = set(layer_types) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"config.json: layer type '{min(unknown)}' is not served")
    return tuple(
        int(window) if kind == "sliding_attention" else None for kind in layer_types[:num_layers]
    )
