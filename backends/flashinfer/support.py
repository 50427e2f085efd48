"""What FlashInfer's kernels compute. Imports neither torch nor FlashInfer."""

from __future__ import annotations

from octavo.backends.attention.features import missing_feature, uneven_heads
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

HEAD_SIZES = (64, 128, 256)
DTYPES = ("float16", "bfloat16")
KV_DTYPES = (*DTYPES, "float8_e4m3fn", "float8_e5m2")
CAPABILITY = (8, 0)


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    reason = missing_feature(spec, "flashinfer")
    if reason is not None:
        return reason
    if platform.device != "cuda":
        return f"the flashinfer backend runs on cuda, this is {platform.device}"
    reason = uneven_heads(spec)
    if reason is not None:
        return reason
    if spec.head_size != spec.value_head_size:
        return (
            f"keys have {spec.head_size} values and values {spec.value_head_size}, the flashinfer "
            "backend takes equal sizes"
        )
    if spec.head_size not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        return f"the flashinfer backend takes heads of {sizes} values, not {spec.head_size}"
    return None


def probe(context: ProbeContext) -> Availability:
    """Whether attention of every layer of the model can be computed here."""
    facts = context.facts
    dtype = facts.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        return Availability(False, f"computes {' and '.join(DTYPES)}, the model's dtype is {dtype}")
    kv_dtype = {"fp8": "float8_e4m3fn"}.get(facts.get("kv_dtype", ""), facts.get("kv_dtype"))
    if kv_dtype is not None and kv_dtype not in KV_DTYPES:
        return Availability(False, f"keeps no {kv_dtype} KV cache")
    for spec in facts.get("attention_specs") or ():
        reason = unsupported(spec, context.platform)
        if reason:
            return Availability(False, reason)
    return Availability(True)
