"""The gate of a feed-forward layer: activation(gate) * up.

Legend: T tokens, I inner features.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from octavo.backends.triton.launch import FUSED

Activation = Literal["silu", "gelu", "gelu_tanh"]
_KINDS: dict[str, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
_BLOCK = 1024


@triton.jit
def gate_kernel(x, out, x_row, out_row, size, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Program (token, part). KIND: 0 SiLU, 1 GELU by the error function, 2 GELU by tanh."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = i < size
    gate = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + size + i, mask=there, other=0.0).to(tl.float32)
    if KIND == 0:
        active = gate / (1.0 + tl.exp(-gate))
    elif KIND == 1:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(inner)) / 2 = 1 / (1 + exp(-2 inner))
        active = gate / (1.0 + tl.exp(-2.0 * inner))
    # As two operators would: the activation is rounded before the product.
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_row + i, (active * up).to(out.dtype.element_ty), mask=there)


def gate(
    x: torch.Tensor, activation: Activation = "silu", out: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, I] of x[T, 2 I], gates then what they gate, into `out` (or new memory)."""
    num_tokens, size = x.shape[0], x.shape[1] // 2
    if out is None:
        out = x.new_empty(num_tokens, size)
    if num_tokens:
        gate_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            x,
            out,
            x.stride(0),
            out.stride(0),
            size,
            BLOCK=_BLOCK,
            KIND=_KINDS[activation],
            num_warps=4,
            **FUSED,
        )
    return out
