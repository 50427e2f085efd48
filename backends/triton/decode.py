"""Attention of decode rows over a paged cache: split-KV, then a combine pass (flash-decoding).

A row's cached tokens are cut into `splits` ranges. One program computes one range for one KV head
and all query heads that share it, so that keys and values are read once; the partial results of a
row are weighed by their sums of exponentials in a second kernel. The number of splits is fixed by
the batch's size, never by its lengths, so that a captured graph stays valid; how a row is cut
depends on its own length and the number of splits alone.

Legend: B rows, H query heads, K KV heads, G = H / K, D head size, Dv value head size, N blocks, P
tokens a block, M blocks a row at most, S splits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.convert import rope_pair, rotate
from octavo.backends.triton.launch import FUSED, byte_view, power_of_2
from octavo.backends.triton.tile import accumulate, scores
from octavo.core.contracts.model import AttentionSpec

TOKENS = 32
"""Cached tokens that a program attends at once."""


_SCALARS = ("seq_lens", "positions")
"""Read number by number. A phase's part of a batch begins anywhere, which is nothing to compile
anew for."""


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def decode_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    positions,
    cos_sin,
    out,
    partial,
    lse,
    q_row,
    q_head,
    kc_block,
    kc_token,
    kc_head,
    vc_block,
    vc_token,
    vc_head,
    table_row,
    out_row,
    out_head,
    scale,
    window,
    SPLITS: tl.constexpr,
    G: tl.constexpr,
    GB: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    DB: tl.constexpr,
    DVB: tl.constexpr,
    P: tl.constexpr,
    TOKENS: tl.constexpr,
    CAP: tl.constexpr,
    ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FP8: tl.constexpr,
):
    """Program (row, KV head, split). window: 0 for none. partial: float32[B, H, SPLITS, Dv] and
    lse: float32[B, H, SPLITS] (in base 2) when SPLITS > 1, else `out` is written."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + row)
    first = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    # Ranges begin at multiples of TOKENS, counted from the beginning of the sequence.
    begin = first // TOKENS
    pieces = tl.cdiv(length, TOKENS) - begin
    each = tl.cdiv(pieces, SPLITS)
    start = (begin + split * each) * TOKENS
    stop = tl.minimum(start + each * TOKENS, length)

    g = tl.arange(0, GB)
    d = tl.arange(0, DB)
    dv = tl.arange(0, DVB)
    heads = kv_head * G + g
    mask = (g < G)[:, None] & (d < D)[None, :]
    source = q + row.to(tl.int64) * q_row + heads[:, None] * q_head
    query = tl.load(source + d[None, :], mask=mask, other=0.0)
    if ROPE > 0:
        other, pair, sign = rope_pair(d, ROPE, INTERLEAVED)
        turned = d < ROPE
        partner = tl.load(source + other[None, :], mask=mask, other=0.0)
        angle = cos_sin + tl.load(positions + row).to(tl.int64) * ROPE
        cos = tl.load(angle + pair, mask=turned, other=1.0)
        sin = tl.load(angle + ROPE // 2 + pair, mask=turned, other=0.0)
        query = rotate(
            query, partner, cos[None, :], sin[None, :], sign[None, :], turned[None, :]
        ).to(q.dtype.element_ty)

    top = tl.full([GB], float("-inf"), tl.float32)
    total = tl.zeros([GB], tl.float32)
    acc = tl.zeros([GB, DVB], tl.float32)
    table = block_table + row.to(tl.int64) * table_row
    for at in range(start, stop, TOKENS):
        token = at + tl.arange(0, TOKENS)
        seen = (token < stop) & (token >= first)
        block = tl.load(table + token // P, mask=seen, other=0).to(tl.int64)
        offset = token % P
        place = block * kc_block + offset * kc_token + kv_head * kc_head
        logits = scores(query, k_cache, place, seen, seen[None, :], scale, D, DB, CAP, FP8)
        place = block * vc_block + offset * vc_token + kv_head * vc_head
        top, total, acc = accumulate(
            logits, v_cache, place, seen, top, total, acc, DV, DVB, q.dtype.element_ty, FP8
        )

    safe = tl.where(total > 0, total, 1.0)
    result = acc / safe[:, None]
    kept = (g < G)[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        target = out + row.to(tl.int64) * out_row + heads[:, None] * out_head + dv[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=kept)
    else:
        place = (row.to(tl.int64) * (tl.num_programs(1) * G) + heads) * SPLITS + split
        tl.store(partial + place[:, None] * DV + dv[None, :], result, mask=kept)
        tl.store(lse + place, tl.where(total > 0, top + tl.log2(safe), float("-inf")), mask=g < G)


@triton.jit
def combine_kernel(
    partial,
    lse,
    out,
    out_row,
    out_head,
    SPLITS: tl.constexpr,
    SB: tl.constexpr,
    DV: tl.constexpr,
    DVB: tl.constexpr,
):
    """Program (row, query head): its SPLITS partial results, weighed by 2^lse."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, SB)
    dv = tl.arange(0, DVB)
    place = (row * tl.num_programs(1) + head) * SPLITS + s
    size = tl.load(lse + place, mask=s < SPLITS, other=float("-inf"))
    top = tl.max(size, 0)
    weight = tl.exp2(size - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    values = tl.load(
        partial + place[:, None] * DV + dv[None, :],
        mask=(s < SPLITS)[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    result = tl.sum(values * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    target = out + row * out_row + head * out_head + dv
    tl.store(target, result.to(out.dtype.element_ty), mask=dv < DV)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    spec: AttentionSpec,
    *,
    splits: int = 1,
    partial: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
) -> None:
    """q[B, H, D], one token a row, over pools [N, P, K, D] and [N, P, K, Dv], by int32[B, M] tables
    and int32[B] lengths, into out[B, H, Dv]. A row of length 0 gives zeros.

    With `cos_sin` float32[L, R] queries are rotated at int64[B] `positions`. partial, lse: float32
    memory for at least B * H * S * Dv and B * H * S values when splits > 1; `run` allocates none.
    """
    rows = q.shape[0]
    if not rows:
        return
    k_cache, fp8 = byte_view(k_cache)
    v_cache, _ = byte_view(v_cache)
    group = spec.num_heads // spec.num_kv_heads
    value_size = spec.value_head_size
    wide = max(spec.head_size, value_size) > 128
    if splits == 1 or partial is None or lse is None:
        assert splits == 1, "split-KV needs memory for partial results"
        partial = lse = out
    decode_kernel[(rows, spec.num_kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        seq_lens if positions is None else positions,
        out if cos_sin is None else cos_sin,
        out,
        partial,
        lse,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        float(spec.scale),
        spec.window or 0,
        SPLITS=splits,
        G=group,
        GB=max(16, power_of_2(group)),
        D=spec.head_size,
        DV=value_size,
        DB=max(16, power_of_2(spec.head_size)),
        DVB=max(16, power_of_2(value_size)),
        P=k_cache.shape[1],
        TOKENS=TOKENS,
        CAP=float(spec.soft_cap or 0.0),
        ROPE=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=spec.rope_interleaved,
        FP8=fp8,
        num_warps=4 if wide else 2,
        num_stages=1 if q.dtype == torch.float32 and wide else 2,
        **FUSED,
    )
    if splits > 1:
        combine_kernel[(rows, spec.num_heads)](
            partial,
            lse,
            out,
            *out.stride()[:2],
            SPLITS=splits,
            SB=power_of_2(splits),
            DV=value_size,
            DVB=power_of_2(value_size),
            num_warps=2,
            **FUSED,
        )
