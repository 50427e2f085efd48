"""The gated feed-forward layer: down(silu(gate(x)) * up(x)), gate and up fused."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from octavo.core.contracts.quantization import QuantizationMethod


class GatedMLP(nn.Module):
    """[T, E] to [T, E] through I inner features."""

    def __init__(
        self,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        quantization: QuantizationMethod,
    ) -> None:
        super().__init__()
        self.intermediate_size = intermediate_size
        self.gate_up = quantization.linear(
            f"{prefix}.gate_up_proj", hidden_size, (intermediate_size, intermediate_size), bias
        )
        self.down = quantization.linear(
            f"{prefix}.down_proj", intermediate_size, (hidden_size,), bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).split(self.intermediate_size, dim=-1)
        return self.down(functional.silu(gate).mul_(up))  # type: ignore[no-any-return]
