"""What attention the native kernels compute. Imports no torch: the registry asks before anything is
loaded."""

from __future__ import annotations

from octavo.backends.cpu.build import probe as compiler
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

HEAD_MOST = 512
"""Most values of a head; `HEAD_MOST` of attention.h."""


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    for name, what in (
        ("sinks", "attention sinks"),
        ("alibi", "ALiBi"),
        ("latent", "latent attention"),
    ):
        if getattr(spec, name):
            return f"the cpu backend has no {what}"
    if platform.device != "cpu":
        return f"the cpu backend does not run on {platform.device}"
    if spec.num_heads % spec.num_kv_heads:
        return f"{spec.num_heads} query heads cannot share {spec.num_kv_heads} KV heads evenly"
    size = max(spec.head_size, spec.value_head_size)
    if size > HEAD_MOST:
        return f"heads have {size} values, the cpu backend takes {HEAD_MOST} at most"
    return None


def probe(context: ProbeContext) -> Availability:
    """Whether the kernels can be built and compute every layer of the model."""
    dtype = context.facts.get("dtype", "float32")
    if dtype not in ("float32", "bfloat16"):
        return Availability(False, f"computes float32 and bfloat16, the model's dtype is {dtype}")
    for spec in context.facts.get("attention_specs") or ():
        reason = unsupported(spec, context.platform)
        if reason:
            return Availability(False, reason)
    return compiler(context)
