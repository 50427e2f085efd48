"""Rows of activations in 8 bits, each with a scale of its own.

Legend: T tokens, E features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.convert import to_cache
from octavo.backends.triton.launch import EXACT, byte_view, power_of_2

FEATURES_MOST = 65536
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def quantize_kernel(
    x,
    out,
    scales,
    x_row,
    out_row,
    size,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    INTEGER: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (token)."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    there = e < size
    values = tl.load(x + row * x_row + e, mask=there, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST)
    tl.store(scales + row, scale)
    scaled = tl.div_rn(values, tl.where(scale > 0, scale, 1.0))
    if INTEGER:
        # Adding 1.5 * 2^23 leaves no bit for fractions: rounded, half to even.
        code = ((scaled + 12582912.0) - 12582912.0).to(tl.int32).to(tl.int8)
    else:
        code = to_cache(tl.clamp(scaled, -LARGEST, LARGEST), out.dtype.element_ty, FP8)
    tl.store(out + row * out_row + e, code, mask=there)


def quantize_rows(
    x: torch.Tensor, dtype: torch.dtype = torch.int8
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [T, E] of `dtype`, scales float32[T]) with x[T, E] close to codes * scales.

    dtype: int8, float8_e4m3fn or float8_e5m2; the largest value of a row becomes its largest."""
    num_tokens, size = x.shape
    if dtype not in _LARGEST:
        names = ", ".join(str(name).removeprefix("torch.") for name in _LARGEST)
        raise ValueError(f"quantize_rows makes {names}, not {dtype}")
    if size > FEATURES_MOST:
        raise ValueError(f"quantize_rows takes rows of {FEATURES_MOST} values at most, got {size}")
    codes = torch.empty(num_tokens, size, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        view, fp8 = byte_view(codes)
        block = power_of_2(size)
        quantize_kernel[(num_tokens,)](
            x,
            view,
            scales,
            x.stride(0),
            view.stride(0),
            size,
            LARGEST=_LARGEST[dtype],
            BLOCK=block,
            INTEGER=dtype == torch.int8,
            FP8=fp8,
            num_warps=min(16, max(1, block // 512)),
            **EXACT,
        )
    return codes, scales
