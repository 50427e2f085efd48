"""RMSNorm, with the addition of a residual before it.

Legend: T tokens, E features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.launch import FUSED, power_of_2

FEATURES_MOST = 65536


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    x_row,
    residual_row,
    out_row,
    eps,
    size,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
):
    """Program (token). With ADD the residual becomes the sum, and is what is normalized."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    there = e < size
    values = tl.load(x + row * x_row + e, mask=there, other=0.0).to(tl.float32)
    if ADD:
        place = residual + row * residual_row + e
        values += tl.load(place, mask=there, other=0.0).to(tl.float32)
        # The sum as it is kept, so that the norm does not depend on whether it was fused.
        kept = values.to(residual.dtype.element_ty)
        tl.store(place, kept, mask=there)
        values = kept.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
    factor = tl.load(weight + e, mask=there, other=0.0).to(tl.float32)
    result = values * scale * factor
    tl.store(out + row * out_row + e, result.to(out.dtype.element_ty), mask=there)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[T, E] / sqrt(mean(x^2) + eps) * weight[E], computed in float32, into `out` (or new memory).
    With `residual` [T, E]: residual += x, and the sum is normalized."""
    num_tokens, size = x.shape
    if size > FEATURES_MOST:
        raise ValueError(f"rms_norm takes rows of {FEATURES_MOST} values at most, got {size}")
    if out is None:
        out = torch.empty_like(x)
    added = x if residual is None else residual
    if num_tokens:
        block = power_of_2(size)
        rms_norm_kernel[(num_tokens,)](
            x,
            added,
            weight,
            out,
            x.stride(0),
            added.stride(0),
            out.stride(0),
            eps,
            size,
            BLOCK=block,
            ADD=residual is not None,
            num_warps=min(16, max(1, block // 512)),
            **FUSED,
        )
    return out
