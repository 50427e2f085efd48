"""What no built-in attention backend computes, and what each asks of a layer's heads. Imports no
torch."""

from __future__ import annotations

from octavo.core.contracts.model import AttentionSpec

_EXTRAS = {"sinks": "attention sinks", "alibi": "ALiBi", "latent": "latent attention"}


def missing_feature(spec: AttentionSpec, backend: str) -> str | None:
    """Why a backend without sinks, ALiBi and latents cannot compute the layer; None when it can."""
    for name, what in _EXTRAS.items():
        if getattr(spec, name):
            return f"the {backend} backend has no {what}"
    return None


def uneven_heads(spec: AttentionSpec) -> str | None:
    """Why the query heads cannot be shared out; None when they can."""
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
    return None
