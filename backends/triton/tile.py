"""What a tile of cached tokens adds to running sums of attention: the step of decode and prefill.

Legend: M lines (queries times heads), C cached tokens of a tile, D head size, Dv value head size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.backends.triton.convert import LOG2E, from_cache, soft_capped


@triton.jit
def scores(
    query,
    k_cache,
    rows,
    there,
    seen,
    scale,
    D: tl.constexpr,
    DB: tl.constexpr,
    CAP: tl.constexpr,
    FP8: tl.constexpr,
):
    """float32[M, C] logits in base 2 of query[M, D], -inf where not `seen`. rows: int64[C], where
    the tokens' keys begin; tokens that are not `there` are not read."""
    d = tl.arange(0, DB)
    key = tl.load(
        k_cache + rows[None, :] + d[:, None], mask=(d < D)[:, None] & there[None, :], other=0.0
    )
    key = from_cache(key, query.dtype, FP8)
    logits = tl.dot(query, key, input_precision="tf32x3") * scale
    if CAP > 0:
        logits = soft_capped(logits, CAP)
    return tl.where(seen, logits * LOG2E, float("-inf"))


@triton.jit
def accumulate(
    logits,
    v_cache,
    rows,
    there,
    top,
    total,
    acc,
    DV: tl.constexpr,
    DVB: tl.constexpr,
    dtype: tl.constexpr,
    FP8: tl.constexpr,
):
    """Running maximum [M], sum of weights [M] and weighted values [M, Dv] with a tile more. rows:
    int64[C], where the tokens' values begin."""
    new = tl.maximum(top, tl.max(logits, 1))
    # Until a token was seen the maximum is -inf, and differences to it are not numbers.
    base = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)
    dv = tl.arange(0, DVB)
    value = tl.load(
        v_cache + rows[:, None] + dv[None, :],
        mask=there[:, None] & (dv < DV)[None, :],
        other=0.0,
    )
    value = from_cache(value, dtype, FP8)
    acc = acc * shrink[:, None] + tl.dot(weight.to(dtype), value, input_precision="tf32x3")
    return new, total * shrink + tl.sum(weight, 1), acc
