"""The sampler contract's draw over the whole vocabulary: argmax of scaled logits plus Gumbel noise.

Noise is a pure function of seed, position, index and token id (see
`octavo.core.contracts.sampler`): Philox 4x32-10 in integers, two logarithms in float64. It is
computed only where a token can still win: a first pass finds each part's largest value, and in the
second one a part whose largest value lies further below the row's than any two draws differ is left
out. Which token wins does not change.

Greedy rows (temperature 0) take the argmax of their logits. Legend: R rows, V vocabulary, C parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.backends.triton.launch import EXACT, power_of_2
from octavo.kernels import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    PHILOX_MULTIPLIERS,
    PHILOX_ROUNDS,
    PHILOX_WEYL,
)

FOURS = 256
"""Blocks of four tokens, which share a call of the generator, in a part."""

_M0, _M1 = (tl.constexpr(value) for value in PHILOX_MULTIPLIERS)
_W0, _W1 = (tl.constexpr(value) for value in PHILOX_WEYL)
_ROUNDS = tl.constexpr(PHILOX_ROUNDS)
_LOW = tl.constexpr(0xFFFFFFFF)
_REACH = tl.constexpr(GUMBEL_MAX - GUMBEL_MIN + 0.01)
_ROUNDING = tl.constexpr(2.0**-22)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_NAN = tl.constexpr(0x7FFFFFFFFFFFFFFF)
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def philox(block, position, index, seed):
    """Four words (uint64 below 2^32) for the counters (block, position, index, 0)."""
    c0 = block.to(tl.uint64)
    c1 = (position.to(tl.uint64) & _LOW) + tl.zeros_like(c0)
    c2 = (index.to(tl.uint64) & _LOW) + tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = seed.to(tl.uint64) & _LOW
    k1 = seed.to(tl.uint64) >> 32
    for number in tl.static_range(_ROUNDS):
        if number > 0:
            k0 = (k0 + _W0) & _LOW
            k1 = (k1 + _W1) & _LOW
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0 = (p1 >> 32) ^ c1 ^ k0
        c2 = (p0 >> 32) ^ c3 ^ k1
        c1 = p1 & _LOW
        c3 = p0 & _LOW
    return c0, c1, c2, c3


@triton.jit
def gumbel(word):
    """float32 noise of a word."""
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(u))).to(tl.float32)


@triton.jit
def scaled_logits(logits, temperature, place, there):
    """float32: logits / temperature, at most the largest finite number; logits of greedy rows."""
    values = tl.load(logits + place, mask=there, other=float("-inf"))
    scaled = tl.div_rn(values, tl.zeros_like(values) + tl.where(temperature > 0, temperature, 1.0))
    capped = tl.where(scaled > _LARGEST, _LARGEST, scaled)
    return tl.where(temperature > 0, capped, values)


@triton.jit
def order_key(score, token):
    """int64 that orders as (score, lower token first). NaN is above everything."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    upper = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32
    key = upper | (token.to(tl.int64) ^ _LOW)
    return tl.where(score != score, _NAN, key)  # noqa: PLR0124


@triton.jit
def top_kernel(
    logits,
    temperatures,
    keys,
    row_stride,
    vocab_size,
    parts,
    FOURS: tl.constexpr,
):
    """Program (row, part): the key of the part's largest scaled logit."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    token = part * (FOURS * 4) + tl.arange(0, FOURS * 4)
    there = token < vocab_size
    values = scaled_logits(
        logits + row.to(tl.int64) * row_stride, tl.load(temperatures + row), token, there
    )
    key = tl.where(there, order_key(values, token), _NOTHING)
    tl.store(keys + row * parts + part, tl.max(key, 0))


@triton.jit
def draw_kernel(
    logits,
    temperatures,
    seeds,
    positions,
    indices,
    tops,
    keys,
    row_stride,
    vocab_size,
    parts,
    FOURS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (row, part): the key of the part's best score; of nothing where no token can win."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    p = tl.arange(0, PARTS)
    all_tops = tl.load(tops + row * parts + p, mask=p < parts, other=_NOTHING)
    best_top = tl.max(all_tops, 0)
    mine = tl.load(tops + row * parts + part)
    # Greedy rows are decided, and so are rows with a NaN, whose token has no meaning.
    if (temperature <= 0) | (best_top == _NAN):
        tl.store(keys + row * parts + part, mine)
    else:
        top = from_order((best_top >> 32).to(tl.int32))
        own = from_order((mine >> 32).to(tl.int32))
        margin = _REACH + tl.abs(top.to(tl.float64)) * _ROUNDING
        if (own.to(tl.float64) < top.to(tl.float64) - margin) | (own == float("-inf")):
            tl.store(keys + row * parts + part, _NOTHING)
        else:
            block = part * FOURS + tl.arange(0, FOURS)
            w0, w1, w2, w3 = philox(
                block,
                tl.load(positions + row),
                tl.load(indices + row),
                tl.load(seeds + row),
            )
            best = tl.full([FOURS], _NOTHING, tl.int64)
            source = logits + row.to(tl.int64) * row_stride
            for lane in tl.static_range(4):
                token = block * 4 + lane
                there = token < vocab_size
                values = scaled_logits(source, temperature, token, there)
                if lane == 0:
                    word = w0
                elif lane == 1:
                    word = w1
                elif lane == 2:
                    word = w2
                else:
                    word = w3
                key = order_key(values + gumbel(word), token)
                best = tl.maximum(best, tl.where(there, key, _NOTHING))
            tl.store(keys + row * parts + part, tl.max(best, 0))


@triton.jit
def from_order(bits):
    """float32 of the upper half of an `order_key`."""
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pick_kernel(tops, keys, token_ids, valid, parts, PARTS: tl.constexpr):
    """Program (row): the token of the best key, and whether it is one."""
    row = tl.program_id(0)
    p = tl.arange(0, PARTS)
    top = tl.max(tl.load(tops + row * parts + p, mask=p < parts, other=_NOTHING), 0)
    key = tl.max(tl.load(keys + row * parts + p, mask=p < parts, other=_NOTHING), 0)
    good = (top != _NAN) & (from_order((top >> 32).to(tl.int32)) > float("-inf"))
    token = (key & _LOW) ^ _LOW
    tl.store(token_ids + row, tl.where(good, token, 0))
    tl.store(valid + row, good)


class GumbelDraw:
    """Draws for at most `max_rows` rows of V logits, in memory made here: no call allocates."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self._parts = triton.cdiv(vocab_size, 4 * FOURS)
        self._vocab_size = vocab_size
        self._keys = torch.empty(2, max_rows * self._parts, dtype=torch.int64, device=device)
        self._token_ids = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._valid = torch.empty(max_rows, dtype=torch.bool, device=device)

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        seed: torch.Tensor,
        position: torch.Tensor,
        index: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token ids int64[R], valid bool[R]) of logits float32[R, V], which are not changed.
        temperature: float32[R], 0 is greedy; seed, position, index: int64[R]. A row is not valid
        when it holds a NaN or nothing but -inf; its token is then 0. Views of memory that the next
        call writes."""
        rows, parts = logits.shape[0], self._parts
        token_ids, valid = self._token_ids[:rows], self._valid[:rows]
        if not rows:
            return token_ids, valid
        tops, keys = self._keys
        size = {"FOURS": FOURS, "num_warps": 4, **EXACT}
        shape = (logits.stride(0), self._vocab_size, parts)
        top_kernel[(rows, parts)](logits, temperature, tops, *shape, **size)
        width = power_of_2(parts)
        columns = (temperature, seed, position, index)
        draw_kernel[(rows, parts)](logits, *columns, tops, keys, *shape, PARTS=width, **size)
        pick_kernel[(rows,)](
            tops, keys, token_ids, valid.view(torch.int8), parts, PARTS=width, num_warps=4, **EXACT
        )
        return token_ids, valid
