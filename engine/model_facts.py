"""Facts about a model that its config.json alone tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.contracts.model import AttentionSpec
from octavo.core.hf_config import text_config

_LENGTH_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
)


def architecture(config: Mapping[str, Any]) -> str | None:
    """The first of `architectures`."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def checkpoint_dtype(config: Mapping[str, Any]) -> str | None:
    """`dtype` or `torch_dtype` (its older name), as `float32`, `bfloat16` or `float16`."""
    for part in (config, text_config(config)):
        for key in ("dtype", "torch_dtype"):
            name = str(part.get(key) or "").removeprefix("torch.")
            if name in ("float32", "bfloat16", "float16"):
                return name
    return None


def model_length(config: Mapping[str, Any]) -> tuple[int, str] | None:
    """The longest sequence that a model is made for, in tokens, and where that is written.

    Rope scaling `linear` and `dynamic` multiply the length by `factor`; `yarn` multiplies the
    length before scaling. In `llama3` and `longrope` checkpoints the length includes it already.
    """
    text = text_config(config)
    lengths = [(_integer(text.get(key)), key) for key in _LENGTH_KEYS]
    known = [(length, key) for length, key in lengths if length]
    if not known:
        return None
    length, key = min(known)
    rope = _rope(text)
    kind = rope.get("rope_type") or rope.get("type")
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or factor <= 1:
        return length, key
    if kind in ("linear", "dynamic"):
        return int(length * factor), f"{key} {length} times rope factor {factor:g}"
    if kind == "yarn":
        original = _integer(rope.get("original_max_position_embeddings")) or length
        scaled = max(length, int(original * factor))
        return scaled, f"{original} positions before scaling times rope factor {factor:g}"
    return length, key


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _rope(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Rope scaling under its older and newer key. Where layers differ, that of full attention."""
    for key in ("rope_scaling", "rope_parameters"):
        value = text.get(key)
        if isinstance(value, Mapping) and value:
            inner = value.get("full_attention")
            return inner if isinstance(inner, Mapping) else value
    return {}


def attention_specs(config: Mapping[str, Any]) -> tuple[AttentionSpec, ...] | None:
    """The distinct attention layers as far as config.json tells; None when it does not (latent
    attention, no head count)."""
    text = text_config(config)
    heads = _integer(text.get("num_attention_heads")) or _integer(text.get("n_head"))
    hidden = _integer(text.get("hidden_size")) or _integer(text.get("n_embd"))
    head_size = _integer(text.get("head_dim")) or (hidden // heads if heads and hidden else 0)
    if not head_size or text.get("kv_lora_rank"):
        return None
    scale = text.get("query_pre_attn_scalar")
    partial = _rope(text).get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    soft_cap = text.get("attn_logit_softcapping")
    return tuple(
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=_integer(text.get("num_key_value_heads")) or heads,
            head_size=head_size,
            value_head_size=_integer(text.get("v_head_dim")) or head_size,
            scale=float(scale or head_size) ** -0.5,
            window=window,
            soft_cap=float(soft_cap) if soft_cap else None,
            rope_dim=int(head_size * float(partial or 1.0)),
        )
        for window in _windows(text)
    )


def _windows(text: Mapping[str, Any]) -> list[int | None]:
    """The distinct sliding windows of a model's layers."""
    window = _integer(text.get("sliding_window"))
    if not window or text.get("use_sliding_window") is False:
        return [None]
    kinds = text.get("layer_types")
    if not isinstance(kinds, list):
        return [window]
    names = sorted(set(map(str, kinds)))
    return [window if name == "sliding_attention" else None for name in names] or [None]


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """`quantization_config.quant_method`, in the form of plugin names."""
    section = config.get("quantization_config") or text_config(config).get("quantization_config")
    if not isinstance(section, Mapping):
        return None
    method = section.get("quant_method")
    return str(method).lower().replace("-", "_") if method else None
