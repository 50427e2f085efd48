"""Attention of rows with any number of tokens over a paged cache: chunked, causal, windowed.

One program computes a tile: some queries of one row, with all query heads that share a KV head side
by side, so that keys and values are read once for the group. The context is read from the pool,
this step's own tokens too, which are written before. A query's sums run over its tokens in pieces
that begin at multiples of TOKENS from the start of the sequence, whatever the chunk or the batch.

Legend: T tokens, B rows, H query heads, K KV heads, G = H / K, D head size, Dv value head size, N
blocks, P tokens a block, M blocks a row at most, Q queries of a tile, n tiles.
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


_SCALARS = ("seq_lens", "query_start", "tile_row", "tile_query", "positions")
"""Read number by number. A phase's part of a batch begins anywhere, which is nothing to compile
anew for."""


@triton.jit(do_not_specialize_on_alignment=_SCALARS)
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    block_table,
    seq_lens,
    query_start,
    tile_row,
    tile_query,
    positions,
    cos_sin,
    out,
    q_token,
    q_head,
    kc_block,
    kc_token,
    kc_head,
    vc_block,
    vc_token,
    vc_head,
    table_row,
    out_token,
    out_head,
    scale,
    window,
    G: tl.constexpr,
    ROWS: tl.constexpr,
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
    """Program (tile, KV head). Line m of a tile is query m // G of the tile and head m % G."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tile_row + tile)
    skipped = tl.load(tile_query + tile)
    begin = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - begin
    context = tl.load(seq_lens + row) - count

    Q: tl.constexpr = ROWS // G
    m = tl.arange(0, ROWS)
    index = skipped + m // G
    heads = kv_head * G + m % G
    used = (m < Q * G) & (index < count)
    position = context + index
    token = (begin + index).to(tl.int64)
    d = tl.arange(0, DB)
    dv = tl.arange(0, DVB)
    mask = used[:, None] & (d < D)[None, :]
    source = q + token[:, None] * q_token + heads[:, None] * q_head
    query = tl.load(source + d[None, :], mask=mask, other=0.0)
    if ROPE > 0:
        other, pair, sign = rope_pair(d, ROPE, INTERLEAVED)
        turned = d < ROPE
        partner = tl.load(source + other[None, :], mask=mask, other=0.0)
        at = tl.load(positions + token, mask=used, other=0).to(tl.int64)
        angle = cos_sin + at[:, None] * ROPE + pair[None, :]
        shown = used[:, None] & turned[None, :]
        cos = tl.load(angle, mask=shown, other=1.0)
        sin = tl.load(angle + ROPE // 2, mask=shown, other=0.0)
        query = rotate(query, partner, cos, sin, sign[None, :], turned[None, :]).to(
            q.dtype.element_ty
        )

    stop = tl.minimum(context + skipped + Q, context + count)
    first = tl.where(window > 0, tl.maximum(context + skipped - window + 1, 0), 0)
    start = first // TOKENS * TOKENS
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVB], tl.float32)
    table = block_table + row.to(tl.int64) * table_row
    for piece in range(start, stop, TOKENS):
        cached = piece + tl.arange(0, TOKENS)
        there = (cached < stop) & (cached >= first)
        seen = there[None, :] & (cached[None, :] <= position[:, None])
        if window > 0:
            seen = seen & (cached[None, :] > position[:, None] - window)
        block = tl.load(table + cached // P, mask=there, other=0).to(tl.int64)
        offset = cached % P
        place = block * kc_block + offset * kc_token + kv_head * kc_head
        logits = scores(query, k_cache, place, there, seen, scale, D, DB, CAP, FP8)
        place = block * vc_block + offset * vc_token + kv_head * vc_head
        top, total, acc = accumulate(
            logits, v_cache, place, there, top, total, acc, DV, DVB, q.dtype.element_ty, FP8
        )

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    target = out + token[:, None] * out_token + heads[:, None] * out_head + dv[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=used[:, None] & (dv < DV)[None, :])


def tile_lines(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Lines of a tile: queries times G, a power of two."""
    wide = max(spec.head_size, spec.value_head_size) > 128
    # What a program keeps in registers: lines times values of a head, in float32.
    most = 64 >> (wide + (dtype == torch.float32))
    return max(most, power_of_2(spec.num_heads // spec.num_kv_heads))


def tile_queries(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Queries of a tile."""
    return tile_lines(spec, dtype) // (spec.num_heads // spec.num_kv_heads)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    tiles: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    spec: AttentionSpec,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
) -> None:
    """q[T, H, D] over pools [N, P, K, D] and [N, P, K, Dv] into out[T, H, Dv].

    block_table int32[B, M], seq_lens int32[B], query_start int32[B + 1]. tiles: the row, int32[n],
    and the first query within that row, int32[n], of every tile of `tile_queries` queries; rows
    without tiles are left alone. With `cos_sin` float32[L, R] queries are rotated at int64[T]
    `positions`.
    """
    num_tiles = tiles[0].shape[0]
    if not num_tiles:
        return
    k_cache, fp8 = byte_view(k_cache)
    v_cache, _ = byte_view(v_cache)
    lines = tile_lines(spec, q.dtype)
    wide = max(spec.head_size, spec.value_head_size) > 128
    prefill_kernel[(num_tiles, spec.num_kv_heads)](
        q,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        query_start,
        *tiles,
        query_start if positions is None else positions,
        out if cos_sin is None else cos_sin,
        out,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        *out.stride()[:2],
        float(spec.scale),
        spec.window or 0,
        G=spec.num_heads // spec.num_kv_heads,
        ROWS=lines,
        D=spec.head_size,
        DV=spec.value_head_size,
        DB=max(16, power_of_2(spec.head_size)),
        DVB=max(16, power_of_2(spec.value_head_size)),
        P=k_cache.shape[1],
        TOKENS=TOKENS,
        CAP=float(spec.soft_cap or 0.0),
        ROPE=0 if cos_sin is None else cos_sin.shape[1],
        INTERLEAVED=spec.rope_interleaved,
        FP8=fp8,
        num_warps=4,
        num_stages=1 if q.dtype == torch.float32 and wide else 2,
        **FUSED,
    )
