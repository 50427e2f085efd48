"""Built-in ways to hold weights. Importing this imports no implementation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from octavo.core.contracts import Availability, ProbeContext, Provider, Requirement


def unquantized(context: ProbeContext) -> Availability:
    """A checkpoint that is quantized needs a method that reads its format."""
    config = context.facts.get("config") or {}
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        return Availability(False, f"the checkpoint is quantized ({method})")
    return Availability(True, "the checkpoint is not quantized")


def native_unquantized(context: ProbeContext) -> Availability:
    """The CPU kernels, for checkpoints in floating point."""
    answer = unquantized(context)
    if not answer:
        return answer
    from octavo.backends.cpu.support import linear_probe

    kernels = linear_probe(context)
    return replace(kernels, reason=f"{answer.reason}; {kernels.reason}") if kernels else kernels


_CPU = (Requirement(devices=("cpu",)),)

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="none",
        factory="octavo.backends.quantization.none:Unquantized",
        probe=unquantized,
        summary="Weights in the model's dtype.",
    ),
    Provider(
        name="packed",
        factory="octavo.backends.cpu.linear:PackedMethod",
        requires=_CPU,
        probe=native_unquantized,
        rank=10,
        summary="Weights in the model's dtype, packed for the native CPU kernels.",
    ),
    Provider(
        name="int8",
        factory="octavo.backends.cpu.linear:Int8Method",
        requires=_CPU,
        probe=native_unquantized,
        rank=-1,
        summary="8-bit weights on the native CPU kernels, made on load from any float checkpoint.",
    ),
    Provider(
        name="int4",
        factory="octavo.backends.cpu.linear:Int4Method",
        options="octavo.backends.cpu.options:Int4Options",
        requires=_CPU,
        probe=native_unquantized,
        rank=-1,
        summary="4-bit weights on the native CPU kernels, made on load from any float checkpoint.",
    ),
]
