"""KV write by slot mapping, with the rotation of keys.

Legend: T tokens, K KV heads, D head size, Dv value head size, N blocks, P tokens a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.convert import rope_pair, rotate, to_cache
from octavo.backends.triton.launch import FUSED, byte_view, power_of_2

_SCALARS = ("slot_mapping", "positions")
"""Read number by number. A phase's part of a batch begins anywhere, which is nothing to compile
anew for."""


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def kv_write_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    positions,
    cos_sin,
    k_token,
    k_head,
    v_token,
    v_head,
    kc_block,
    kc_token,
    kc_head,
    vc_block,
    vc_token,
    vc_head,
    block_size,
    D: tl.constexpr,
    DV: tl.constexpr,
    DB: tl.constexpr,
    DVB: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (token, KV head): its key, rotated, and its value into the pool. Nothing is written
    for a negative slot."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    block, offset = slot // block_size, slot % block_size
    if slot >= 0:
        d = tl.arange(0, DB)
        source = k + token * k_token + head * k_head
        key = tl.load(source + d, mask=d < D, other=0.0).to(tl.float32)
        if ROPE > 0:
            other, pair, sign = rope_pair(d, ROPE, INTERLEAVED)
            turned = d < ROPE
            partner = tl.load(source + other, mask=d < D, other=0.0)
            row = cos_sin + tl.load(positions + token).to(tl.int64) * ROPE
            cos = tl.load(row + pair, mask=turned, other=1.0)
            sin = tl.load(row + ROPE // 2 + pair, mask=turned, other=0.0)
            # As the reference does: rounded to the model's dtype before the cache's.
            key = rotate(key, partner, cos, sin, sign, turned).to(k.dtype.element_ty).to(tl.float32)
        target = k_cache + block * kc_block + offset * kc_token + head * kc_head
        key = to_cache(key, k_cache.dtype.element_ty, FP8)
        tl.store(target + d, key, mask=d < D)
        dv = tl.arange(0, DVB)
        value = tl.load(v + token * v_token + head * v_head + dv, mask=dv < DV, other=0.0)
        target = v_cache + block * vc_block + offset * vc_token + head * vc_head
        value = to_cache(value.to(tl.float32), v_cache.dtype.element_ty, FP8)
        tl.store(target + dv, value, mask=dv < DV)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """k[T, K, D] and v[T, K, Dv] into the pools [N, P, K, D] and [N, P, K, Dv] at int64[T] slots;
    a negative slot is padding. With `cos_sin` float32[L, R], keys are rotated at int64[T]
    `positions` first. Tokens and heads may lie apart, the values of a head may not."""
    num_tokens, num_heads, size = k.shape
    if not num_tokens:
        return
    value_size = v.shape[2]
    k_cache, fp8 = byte_view(k_cache)
    v_cache, _ = byte_view(v_cache)
    kv_write_kernel[(num_tokens, num_heads)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        slot_mapping if positions is None else positions,
        slot_mapping if cos_sin is None else cos_sin,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        k_cache.shape[1],
        D=size,
        DV=value_size,
        DB=power_of_2(size),
        DVB=power_of_2(value_size),
        ROPE=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=interleaved,
        FP8=fp8,
        num_warps=1 if size <= 128 else 2,
        **FUSED,
    )
