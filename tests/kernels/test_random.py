"""The contract's random draw against published and own test vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.kernels.random import (
    GUMBEL_MAX,
    GUMBEL_MIN,
    GUMBEL_VECTORS,
    derive_seed,
    gumbel,
    gumbel_blocks,
    philox4x32,
)

# Known answers of philox4x32-10 as published with Random123.
PHILOX_VECTORS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), PHILOX_VECTORS)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert tuple(philox4x32(counter, key).tolist()) == words


def test_philox_on_arrays() -> None:
    counters = np.array([counter for counter, _, _ in PHILOX_VECTORS], np.uint32)
    keys = np.array([key for _, key, _ in PHILOX_VECTORS], np.uint32)
    assert philox4x32(counters, keys).tolist() == [list(words) for _, _, words in PHILOX_VECTORS]


@pytest.mark.parametrize("vector", GUMBEL_VECTORS)
def test_gumbel_vectors(vector: tuple[int, int, int, int, int, float]) -> None:
    seed, position, index, token, word, noise = vector
    words = philox4x32([token >> 2, position, index, 0], [seed & 0xFFFFFFFF, seed >> 32])
    assert words[token & 3] == word
    assert np.float32(-math.log(-math.log((word + 0.5) / 2**32))) == np.float32(noise)
    assert gumbel(seed, position, index, token) == np.float32(noise)
    assert gumbel_blocks(seed, position, index, token >> 2)[token & 3] == np.float32(noise)


def test_gumbel_broadcasts_and_takes_signed_seeds() -> None:
    tokens = np.arange(37)
    seeds = np.array([2**64 - 1, 5], np.uint64)
    both = gumbel(seeds[:, None], np.array([[3], [4]]), 1, tokens[None])
    assert both.shape == (2, 37)
    assert both.dtype == np.float32
    assert (both[0] == gumbel(-1, 3, 1, tokens)).all()
    assert (both[1] == gumbel(5, 4, 1, tokens)).all()
    blocks = gumbel_blocks(seeds.view(np.int64)[:, None], np.array([[3], [4]]), 1, np.arange(10))
    assert (blocks.reshape(2, 40)[:, :37] == both).all()


def test_every_argument_matters() -> None:
    tokens = np.arange(64)
    base = gumbel(1, 2, 3, tokens)
    for other in ((2, 2, 3), (1 + 2**32, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert (gumbel(*other, tokens) != base).mean() > 0.9


def test_bounds_and_moments() -> None:
    noise = gumbel_blocks(7, 0, 0, np.arange(50_000)).astype(np.float64)
    assert noise.min() > GUMBEL_MIN
    assert noise.max() < GUMBEL_MAX
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)
    extreme = [-math.log(-math.log((word + 0.5) / 2**32)) for word in (0, 2**32 - 1)]
    assert extreme == pytest.approx([GUMBEL_MIN, GUMBEL_MAX], abs=1e-3)
    assert extreme[0] > GUMBEL_MIN
    assert extreme[1] < GUMBEL_MAX


def test_derive_seed() -> None:
    # The first outputs of SplitMix64 from 1234567, as widely published.
    assert [derive_seed(1234567, counter) for counter in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    seeds = {derive_seed(seed, counter) for seed in (0, 2**64 - 1) for counter in range(1000)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**64 for seed in seeds)
