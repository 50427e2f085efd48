"""What no built-in attention backend computes, and what each asks of dtypes and heads. Imports no
torch."""

from __future__ import annotations

from collections.abc import Callable, Collection

from octavo.core.contracts import Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

_EXTRAS = {"sinks": "attention sinks", "alibi": "ALiBi", "latent": "latent attention"}


def missing_feature(spec: AttentionSpec, backend: str) -> str | None:
    """Why a backend without sinks, ALiBi and latents cannot compute the layer; None when it can."""
    for name, what in _EXTRAS.items():
        if getattr(spec, name):
            return f"the {backend} backend does not support {what}"
    return None


def uneven_heads(spec: AttentionSpec) -> str | None:
    """Why query heads cannot be divided among KV heads; None when they can."""
    if spec.num_heads % spec.num_kv_heads:
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        return f"{heads} query heads cannot be divided evenly among {kv_heads} KV heads"
    return None


def refused_dtype(context: ProbeContext, dtypes: Collection[str]) -> str | None:
    """Why kernels for these dtypes cannot compute the model; None when they can."""
    dtype = context.facts.get("dtype")
    if dtype is None or dtype in dtypes:
        return None
    return f"supports {' and '.join(dtypes)}, the model's dtype is {dtype}"


def refused_model(
    context: ProbeContext,
    unsupported: Callable[[AttentionSpec, Platform], str | None],
    *,
    dtypes: Collection[str],
    kv_dtypes: Collection[str] | None = None,
) -> str | None:
    """Why attention of some layer of the model cannot be computed or cached; None when all can.
    kv_dtypes: None for any."""
    reason = refused_dtype(context, dtypes)
    if reason is not None:
        return reason
    kv_dtype = context.facts.get("kv_dtype")
    if kv_dtype == "fp8":
        kv_dtype = "float8_e4m3fn"
    if kv_dtype is not None and kv_dtypes is not None and kv_dtype not in kv_dtypes:
        return f"does not support a {kv_dtype} KV cache"
    reasons = (
        unsupported(spec, context.platform) for spec in context.facts.get("attention_specs") or ()
    )
    return next(filter(None, reasons), None)
