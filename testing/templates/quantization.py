"""Quantization `example`: weights in bfloat16, multiplied in the activations' dtype."""

from __future__ import annotations

import torch
from torch import nn

from octavo.core.contracts import Options
from octavo.core.contracts.quantization import QuantizationContext, QuantizationMethod
from octavo.core.errors import WeightError


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleLinear(nn.Module):
    """Several matrices, one below the other, in half the memory of float32."""

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        context: QuantizationContext,
    ) -> None:
        super().__init__()
        self._prefix, self._sizes, self._dtype = prefix, out_features, context.dtype
        total = sum(out_features)
        shape = (total, in_features)
        weight = torch.zeros(shape, dtype=torch.bfloat16, device=context.device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if bias:
            zeros = torch.zeros(total, dtype=context.dtype, device=context.device)
            self.bias = nn.Parameter(zeros, requires_grad=False)
        kinds = ("weight", "bias") if bias else ("weight",)
        self._missing = {(part, kind) for part in range(len(out_features)) for kind in kinds}

    def load(self, part: int, kind: str, tensor: torch.Tensor) -> None:
        """Take a matrix or bias of the checkpoint."""
        target = self.weight if kind == "weight" else self.bias
        if target is None:
            raise WeightError(f"{self._prefix} has no bias, but the checkpoint does")
        first = sum(self._sizes[:part])
        rows = target[first : first + self._sizes[part]]
        if rows.shape != tensor.shape:
            raise WeightError(
                f"{self._prefix} part {part}: {kind} has shape {list(tensor.shape)}, "
                f"expected {list(rows.shape)}"
            )
        rows.copy_(tensor)
        self._missing.discard((part, kind))

    def finish(self) -> None:
        """Everything was loaded."""
        if self._missing:
            lacking = ", ".join(f"{kind} of part {part}" for part, kind in sorted(self._missing))
            raise WeightError(f"{self._prefix}: the checkpoint lacks {lacking}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(self._dtype), self.bias)


class ExampleMethod(QuantizationMethod):
    """Makes such layers from any checkpoint in floating point."""

    def __init__(self, options: ExampleOptions, context: QuantizationContext) -> None:
        self._context = context

    def linear(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> nn.Module:
        return ExampleLinear(prefix, in_features, out_features, bias, self._context)
