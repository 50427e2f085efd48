"""What the native kernels compute. Imports no torch: the registry asks before a model is loaded."""

from __future__ import annotations

from octavo.backends.attention.features import (
    missing_feature,
    refused_dtype,
    refused_model,
    uneven_heads,
)
from octavo.backends.cpu.build import probe as compiler
from octavo.core.contracts import Availability, Platform, ProbeContext
from octavo.core.contracts.model import AttentionSpec

DTYPES = ("float32", "bfloat16")

HEAD_MOST = 512
"""Most values of a head; `HEAD_MOST` of attention.h."""


def unsupported(spec: AttentionSpec, platform: Platform) -> str | None:
    """None when the kernels can compute the layer there, else why not."""
    if platform.device != "cpu":
        return f"the cpu backend does not run on {platform.device}"
    reason = missing_feature(spec, "cpu") or uneven_heads(spec)
    if reason is not None:
        return reason
    size = max(spec.head_size, spec.value_head_size)
    if size > HEAD_MOST:
        return f"head size {size} is above {HEAD_MOST}, the most that the cpu backend supports"
    return None


def linear_probe(context: ProbeContext) -> Availability:
    """Whether the kernels can be built and multiply in the model's dtype."""
    reason = refused_dtype(context, DTYPES)
    return compiler(context) if reason is None else Availability(False, reason)


def decoder_probe(context: ProbeContext) -> Availability:
    """Whether the kernels can be built and what a whole decoder needs has been chosen; whether the
    model is one shows when it is there."""
    chosen = context.facts.get("chosen", {})
    if chosen.get("quantization") == "none":
        return Availability(False, "needs packed weights (model.quantization), this is none")
    attention = chosen.get("attention_backend", "cpu")
    if attention != "cpu":
        return Availability(False, f"needs attention backend cpu, this is {attention}")
    return compiler(context)


def attention_probe(context: ProbeContext) -> Availability:
    """Whether the kernels can be built and compute every layer of the model."""
    reason = refused_model(context, unsupported, dtypes=DTYPES)
    return compiler(context) if reason is None else Availability(False, reason)
