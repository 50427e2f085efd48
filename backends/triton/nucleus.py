"""The exact nucleus of rows that nothing cheaper settled, without a sort and without the host.

Which rows those are is known to the device alone, so the launch is always made; programs of other
rows end at once. The least value that passes is found bit by bit: thirty-two passes over a row,
each adding up integers, so that the result is the sampler contract's to the token. Legend: r rows,
V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.launch import EXACT

_BLOCK = 2048


@triton.jit
def unsigned_order(values):
    """int64 in [0, 2^32) that order as the float32 values do; -0 and 0 are one."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000


@triton.jit
def nucleus_kernel(
    values,
    weights,
    needed,
    where,
    values_row,
    weights_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(where + row) != 0:
        values += row * values_row
        weights += row * weights_row
        need = tl.load(needed + row)
        t = tl.arange(0, BLOCK)
        threshold = need * 0
        step = threshold + 0x80000000
        for _ in range(32):
            tried = threshold + step
            sums = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab_size, BLOCK):
                there = start + t < vocab_size
                order = unsigned_order(tl.load(values + start + t, mask=there, other=0.0))
                weight = tl.load(weights + start + t, mask=there, other=0)
                sums += tl.where(order >= tried, weight, 0)
            threshold = tl.where(tl.sum(sums, 0) >= need, tried, threshold)
            step = step >> 1
        sums = tl.zeros([BLOCK], tl.int64)
        most = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            there = start + t < vocab_size
            order = unsigned_order(tl.load(values + start + t, mask=there, other=0.0))
            weight = tl.load(weights + start + t, mask=there, other=0)
            sums += tl.where(order > threshold, weight, 0)
            most = tl.maximum(most, tl.where(order == threshold, weight, 0))
        # All tokens at the threshold weigh the same.
        each = tl.maximum(tl.max(most, 0), 1)
        wanted = (need - tl.sum(sums, 0) + each - 1) // each
        found = wanted * 0
        for start in range(0, vocab_size, BLOCK):
            there = start + t < vocab_size
            order = unsigned_order(tl.load(values + start + t, mask=there, other=0.0))
            at = (there & (order == threshold)).to(tl.int64)
            kept = (order > threshold) | ((at > 0) & (found + tl.cumsum(at, 0) <= wanted))
            gone = tl.full([BLOCK], float("-inf"), tl.float32)
            tl.store(values + start + t, gone, mask=there & (kept == 0))
            found += tl.sum(at, 0)


def cut_to_nucleus(
    values: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor, where: torch.Tensor
) -> None:
    """In the rows where bool[r], set values float32[r, V] of tokens outside the nucleus to -inf: it
    is the shortest run in descending order (ties: the lower id first) whose weights int64[r, V]
    reach int64[r, 1] `needed`. Other rows keep theirs."""
    num_rows, vocab_size = values.shape
    if not num_rows:
        return
    nucleus_kernel[(num_rows,)](
        values,
        weights,
        needed,
        where.view(torch.int8),
        values.stride(0),
        weights.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=8,
        **EXACT,
    )
