"""RMSNorm: x / sqrt(mean(x^2) + eps) * weight, over the last dimension.

On a CPU a small operator costs its dispatch, so the float32 form is four operators:
sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(E eps)) / sqrt(E), with the sqrt(E) folded into the weight.
Each row's result is independent of the other rows. Elsewhere torch's own fused kernel is used.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Normalizes [..., E]. With `groups` = (n1, n2, ...) it takes [..., n1 + n2 + ..., E], and each
    group of rows has a weight of its own."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
        groups: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.size, self.eps, self.groups = size, eps, groups
        shape = (sum(groups), size) if groups else (size,)
        self.weight = nn.Parameter(
            torch.ones(shape, dtype=dtype, device=device), requires_grad=False
        )
        self.composed = dtype == torch.float32 and device.type == "cpu"
        self.register_buffer("scaled", self.weight * math.sqrt(size), persistent=False)
        limit = torch.tensor(math.sqrt(size * eps), dtype=dtype, device=device)
        self.register_buffer("limit", limit, persistent=False)
        self.scaled: torch.Tensor
        self.limit: torch.Tensor

    def load(self, kind: str, tensor: torch.Tensor, group: int = 0) -> None:
        """Take the weight [E] of a group."""
        assert kind == "weight", f"a norm has no {kind}"
        if self.groups:
            first = sum(self.groups[:group])
            self.weight.data[first : first + self.groups[group]] = tensor
        else:
            self.weight.data.copy_(tensor)
        self.scaled.copy_(self.weight * math.sqrt(self.size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.composed:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x.div(torch.hypot(length, self.limit)).mul_(self.scaled)
        if self.groups:
            return functional.rms_norm(x, (self.size,), None, self.eps).mul_(self.weight)
        return functional.rms_norm(x, (self.size,), self.weight, self.eps)
