"""Repetition, frequency and presence penalties on logits, in one pass over the vocabulary.

What a row knows of each token is one int32: the times it was generated, doubled, plus one when the
prompt has it. Nothing depends on how many tokens are known, so a captured graph stays valid.
Legend: R rows, V vocabulary, C rows of state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.launch import EXACT

_BLOCK = 1024


@triton.jit
def penalties_kernel(
    logits,
    rows,
    state,
    repetitions,
    frequencies,
    presences,
    logits_row,
    vocab_size,
    BLOCK: tl.constexpr,
):
    """Program (row, part). rows: int32, the row of state, -1 for a row without penalties."""
    row = tl.program_id(0)
    mine = tl.load(rows + row).to(tl.int64)
    if mine >= 0:
        t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        there = t < vocab_size
        known = tl.load(state + mine * vocab_size + t, mask=there, other=0)
        place = logits + row.to(tl.int64) * logits_row + t
        values = tl.load(place, mask=there, other=0.0)
        repetition = tl.load(repetitions + row) + tl.zeros_like(values)
        repeated = tl.where(values > 0, tl.div_rn(values, repetition), values * repetition)
        values = tl.where(known != 0, repeated, values)
        count = known >> 1
        values -= tl.load(frequencies + row) * count.to(tl.float32)
        values -= tl.where(count > 0, tl.load(presences + row), 0.0)
        tl.store(place, values, mask=there & (known != 0))


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    state: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Change logits float32[R, V] in place: known tokens are divided (positive) or multiplied by
    `repetition`, then lose `frequency` times their count, then `presence` once; float32[R] each.
    rows int32[R] into state int32[C, V]."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    penalties_kernel[(num_rows, triton.cdiv(vocab_size, _BLOCK))](
        logits,
        rows,
        state,
        repetition,
        frequency,
        presence,
        logits.stride(0),
        vocab_size,
        BLOCK=_BLOCK,
        num_warps=4,
        **EXACT,
    )
