"""The random draw of the sampler contract, in NumPy, and seeds for requests that give none.

A draw is a pure function of (seed, position, index, token id): nothing is remembered between
draws, so it is the same alone, in company, after a preemption and in every sampler. The formula is
in `octavo.core.contracts.sampler`; the generator is Philox 4x32 with 10 rounds (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC'11).

`GUMBEL_VECTORS` are for implementations elsewhere (CUDA, C): reproduce them to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)

GUMBEL_MIN, GUMBEL_MAX = -3.13, 22.874
"""Bounds of the noise, for u in [2**-33, 1 - 2**-33]."""

GUMBEL_VECTORS: tuple[tuple[int, int, int, int, int, float], ...] = (
    # seed, position, index, token id, word of the generator, noise (digits that fix a float32)
    (0x0000000000000000, 0, 0, 0, 0x6627E8D5, 0.08482025),
    (0x0000000000000000, 0, 0, 1, 0xE169C58D, 2.0616612),
    (0x0000000000000000, 0, 0, 2, 0xBC57AC4C, 1.1811829),
    (0x0000000000000000, 0, 0, 3, 0x9B00DBD8, 0.6896918),
    (0x000000000000002A, 17, 0, 4, 0x853E54AD, 0.4261792),
    (0x000000000000002A, 17, 1, 4, 0xDECA0ECA, 1.9736338),
    (0x000000000000002A, 18, 0, 4, 0x87A36B87, 0.45383865),
    (0xFFFFFFFFFFFFFFFF, 131071, 7, 151935, 0x47B8E3EE, -0.2408866),
    (0x0123456789ABCDEF, 1000, 0, 49151, 0xFE21AE4B, 4.9164162),
)

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
_MASK64 = 2**64 - 1

UInt64 = NDArray[np.uint64]


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Philox 4x32-10: uint32[..., 4] words for counters uint32[..., 4] and keys uint32[..., 2]."""
    counters = np.asarray(counter, np.uint32).astype(np.uint64)
    keys = np.asarray(key, np.uint32).astype(np.uint64)
    words = _philox(
        (counters[..., 0], counters[..., 1], counters[..., 2], counters[..., 3]),
        (keys[..., 0], keys[..., 1]),
    )
    return np.stack(np.broadcast_arrays(*words), axis=-1).astype(np.uint32)


def gumbel(
    seed: ArrayLike, position: ArrayLike, index: ArrayLike, token_ids: ArrayLike
) -> NDArray[np.float32]:
    """Gumbel noise float32 of the broadcast shape of the arguments.

    seed: 64 bits, signed or unsigned. position: tokens before the one being drawn. index: which
    choice of the request. token_ids: the tokens whose noise is wanted.
    """
    tokens = _uint64(token_ids)
    words = _request_words(seed, position, index, tokens >> np.uint64(2))
    lane = tokens & np.uint64(3)
    word = np.choose(lane.astype(np.intp), words)
    return _gumbel_of(word)


def gumbel_blocks(
    seed: ArrayLike, position: ArrayLike, index: ArrayLike, blocks: ArrayLike
) -> NDArray[np.float32]:
    """Noise float32[..., 4] of the tokens 4 * block to 4 * block + 3: four for the price of one."""
    words = _request_words(seed, position, index, _uint64(blocks))
    return _gumbel_of(np.stack(np.broadcast_arrays(*words), axis=-1))


def derive_seed(engine_seed: int, counter: int) -> int:
    """Seed of the request number `counter` that gives none: output number `counter` of SplitMix64
    (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA'14) from engine_seed.
    """
    z = (engine_seed + (counter + 1) * _SPLITMIX_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _uint64(value: ArrayLike) -> UInt64:
    return np.asarray(value).astype(np.uint64)


def _request_words(
    seed: ArrayLike, position: ArrayLike, index: ArrayLike, blocks: UInt64
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    seeds = _uint64(seed)
    counter = (blocks, _uint64(position) & _LOW, _uint64(index) & _LOW, np.uint64(0))
    return _philox(counter, (seeds & _LOW, seeds >> _32))


def _philox(
    counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]
) -> tuple[UInt64, UInt64, UInt64, UInt64]:
    """On uint64 arrays that hold 32-bit words and broadcast. Words that are only XORed next keep
    garbage above bit 31, which the mask after the XOR removes."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    m0, m1 = (np.uint64(m) for m in PHILOX_MULTIPLIERS)
    w0, w1 = (np.uint64(w) for w in PHILOX_WEYL)
    for number in range(PHILOX_ROUNDS):
        if number:
            k0, k1 = (k0 + w0) & _LOW, (k1 + w1) & _LOW
        p0, p1 = c0 * m0, c2 * m1
        c0 = ((p1 >> _32) ^ c1 ^ k0) & _LOW
        c2 = ((p0 >> _32) ^ c3 ^ k1) & _LOW
        c1, c3 = p1, p0
    return c0, c1 & _LOW, c2, c3 & _LOW


def _gumbel_of(word: UInt64) -> NDArray[np.float32]:
    u = (word.astype(np.float64) + 0.5) * 2.0**-32
    return np.asarray(-np.log(-np.log(u)), np.float32)
