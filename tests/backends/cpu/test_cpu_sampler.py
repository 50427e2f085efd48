"""The native sampler gives the very tokens of the reference sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu.sampler import CpuSampler
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.testing.conformance.sampler import make_batch

CPU = torch.device("cpu")
Row = tuple[SamplingParams, int, int, int]
"""Parameters, seed, position, index."""


def both(logits: np.ndarray, rows: Sequence[Row], library: Any = None) -> list[tuple[Any, Any]]:
    """(tokens, valid) of the reference and of the kernel."""
    found = []
    for kind in (TorchSampler, CpuSampler):
        sampler = kind(NoOptions(), SamplerContext(logits.shape[1], len(rows), CPU))
        if library is not None and isinstance(sampler, CpuSampler):
            sampler._library = library
        batch = make_batch(logits.shape[1], rows)
        sampled = sampler.sample(torch.from_numpy(logits.copy()), batch)
        found.append((sampled.token_ids, sampled.valid))
    return found


def assert_same(logits: np.ndarray, rows: Sequence[Row], library: Any = None) -> None:
    (wanted, allowed), (tokens, valid) = both(logits, rows, library)
    assert torch.equal(valid, allowed)
    assert tokens[valid].tolist() == wanted[valid].tolist()
    assert ((tokens >= 0) & (tokens < logits.shape[1])).all()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 2e-5, 0.3, 0.7, 1.0, 1.5, 50.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 40, 1000, 3000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 0.9999999]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
)
ROWS = st.lists(
    st.tuples(PARAMS, st.integers(0, 2**64 - 1), st.integers(0, 2**17), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


def make_logits(seed: int, num_rows: int, vocab_size: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits / 2)
        logits[logits == 0] *= rng.choice([-1, 1])  # some zeros are negative
    if kind == "equal":
        logits[:] = -2.5
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
    if kind == "broken":
        logits[0] = -np.inf
        logits[-1, rng.integers(vocab_size)] = np.nan
    if kind == "infinite":
        logits[-1, rng.integers(vocab_size)] = np.inf
    if kind == "huge":
        logits *= np.float32(1e30)
    if kind == "peaked":
        logits *= 4
    return logits


KINDS = ["normal", "ties", "equal", "masked", "broken", "infinite", "huge", "peaked"]


@settings(max_examples=250, deadline=None)
@given(
    rows=ROWS,
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 5, 32, 103, 2051]),
    kind=st.sampled_from(KINDS),
)
def test_equals_the_reference(rows: list[Row], seed: int, vocab_size: int, kind: str) -> None:
    with np.errstate(over="ignore"):
        assert_same(make_logits(seed, len(rows), vocab_size, kind), rows)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 30000, "top_p": 0.95},
        {"temperature": 1.5, "top_p": 0.99, "min_p": 0.001},
    ],
)
def test_a_real_vocabulary(library: Any, params: dict[str, Any]) -> None:
    rows = [
        (SamplingParams(**{"temperature": 1.0} | params), seed, 7 * seed, 0) for seed in range(24)
    ]
    assert_same(make_logits(5, 24, 49152, "normal"), rows, library)
    assert_same(make_logits(6, 24, 49150, "peaked"), rows, library)


@pytest.mark.usefixtures("two_threads")
def test_neither_company_nor_threads_matter() -> None:
    rows = [
        (SamplingParams(temperature=(seed % 3) / 2, top_p=0.95), seed, 3, 0) for seed in range(12)
    ]
    logits = make_logits(8, 12, 1003, "normal")
    together = both(logits, rows)[1][0]
    torch.set_num_threads(1)
    alone = [both(logits[i : i + 1], rows[i : i + 1])[1][0][0] for i in range(12)]
    assert together.tolist() == alone


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.025], np.float32)
    logits = np.tile(np.log(probabilities), (4000, 1))
    rows = [(SamplingParams(temperature=1.0), seed, 0, 0) for seed in range(4000)]
    counts = np.bincount(both(logits, rows)[1][0].numpy(), minlength=5) / 4000
    assert np.abs(counts - probabilities).max() < 0.03
