"""Built-in ways to hold weights. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Availability, ProbeContext, Provider


def unquantized(context: ProbeContext) -> Availability:
    """A checkpoint that is quantized needs a method that reads its format."""
    config = context.facts.get("config") or {}
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        return Availability(False, f"the checkpoint is quantized ({method})")
    return Availability(True, "the checkpoint is not quantized")


PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="none",
        factory="octavo.backends.quantization.none:Unquantized",
        probe=unquantized,
        summary="Weights in the model's dtype.",
    ),
]
