"""Quantization method `none`: weights in the activations' dtype, as [out_features, in_features].

Legend: T tokens, I input features, O output features.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from octavo.backends.fused_loading import FusedLoading
from octavo.core.contracts import NoOptions
from octavo.core.contracts.quantization import QuantizationContext, QuantizationMethod

_FEW_ROWS = range(3, 64)
"""Row counts where MKL's product is slow one way round; see `multiply`."""


class Unquantized(QuantizationMethod):
    """Plain linear layers."""

    def __init__(self, options: NoOptions, context: QuantizationContext) -> None:
        self._dtype, self._device = context.dtype, context.device

    def linear(
        self, prefix: str, in_features: int, out_features: tuple[int, ...], bias: bool
    ) -> nn.Module:
        return FusedLinear(
            prefix, in_features, out_features, bias, dtype=self._dtype, device=self._device
        )


class FusedLinear(nn.Module):
    """y[T, O] = x[T, I] weight^T + bias, where weight[O, I] is several matrices one below the
    other."""

    def __init__(
        self,
        prefix: str,
        in_features: int,
        out_features: tuple[int, ...],
        bias: bool,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.prefix, self.out_features = prefix, out_features
        total = sum(out_features)
        self.weight = nn.Parameter(
            torch.empty(total, in_features, dtype=dtype, device=device), requires_grad=False
        )
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(
                torch.empty(total, dtype=dtype, device=device), requires_grad=False
            )
        self._loading = FusedLoading(prefix, in_features, out_features, bias)

    def load(self, part: int, kind: str, tensor: torch.Tensor) -> None:
        """Take the weight or bias of one of the fused matrices. A parameter of the model (a tied
        embedding) is shared, anything else is copied."""
        start = self._loading.take(part, kind, tensor)
        target = self.weight if kind == "weight" else self.bias
        assert target is not None, "a kind that the layer lacks was refused"
        if isinstance(tensor, nn.Parameter) and tensor.shape == target.shape:
            self.weight = tensor
        else:
            target.data[start : start + self.out_features[part]].copy_(tensor)

    def finish(self) -> None:
        """All was loaded."""
        self._loading.finish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight, self.bias)


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[T, I] weight[O, I]^T + bias[O], contiguous [T, O].

    For a few rows in float32 on a CPU, MKL computes weight x^T up to four times faster than
    x weight^T (49152x576 at 8 rows: 12 ms against 48; 3072x576 at 32 rows: 0.7 against 2.0 on
    2 cores with AVX2). At one or two rows and from 64 on, the usual way is as fast or faster.
    """
    if (
        torch.compiler.is_compiling()
        or x.dtype != torch.float32
        or x.device.type != "cpu"
        or x.shape[0] not in _FEW_ROWS
    ):
        return functional.linear(x, weight, bias)
    # Both operands row by row: copying a few rows costs less than MKL's packing of x^T.
    product = torch.mm(weight, x.t().contiguous()).t().contiguous()
    return product if bias is None else product.add_(bias)
