"""The reference sampler against a naive one that works a row at a time, with Python's own sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import noise, sampling_rows, token_order
from octavo.kernels.random import gumbel
from octavo.plugins.samplers import torch_sampler
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.testing.conformance.sampler import make_batch

MAX_ROWS = 64


def naive(logits: np.ndarray, params: SamplingParams, seed: int, position: int, index: int) -> Any:
    """(token or None, whether a sum came so near to a limit that rounding decides)."""
    if np.isnan(logits).any() or (logits == -np.inf).all():
        return None, False
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    if params.greedy:
        return order[0], False
    scaled = logits / np.float32(params.temperature)
    order = [t for t in order if scaled[t] > -np.inf]
    if params.top_k:
        order = order[: params.top_k]
    close = False
    top = float(scaled[order[0]])
    weights = {t: math.exp(float(scaled[t]) - top) for t in order}
    if params.top_p < 1:
        top_p, total, kept, mass = float(np.float32(params.top_p)), sum(weights.values()), [], 0.0
        for t in order:
            kept.append(t)
            mass += weights[t] / total
            close = close or abs(mass - top_p) < 1e-6
            if mass >= top_p:
                break
        order = kept
    if params.min_p > 0:
        close = close or any(abs(weights[t] - params.min_p) < 1e-6 for t in order)
        order = [t for t in order if weights[t] >= params.min_p]
    score = {t: scaled[t] + gumbel(seed, position, index, t) for t in order}
    return min(score, key=lambda t: (-score[t], t)), close


def make_sampler(vocab_size: int) -> TorchSampler:
    context = SamplerContext(vocab_size, MAX_ROWS, torch.device("cpu"))
    return TorchSampler(NoOptions(), context)


def sample(
    logits: np.ndarray, rows: Sequence[tuple[SamplingParams, int, int, int]]
) -> tuple[list[int], list[bool]]:
    vocab_size = logits.shape[1]
    tensor = torch.from_numpy(logits.copy())
    result = make_sampler(vocab_size).sample(tensor, make_batch(vocab_size, rows))
    assert result.token_ids.dtype == torch.int64
    assert ((result.token_ids >= 0) & (result.token_ids < vocab_size)).all()
    return result.token_ids.tolist(), result.valid.tolist()


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-9, 2e-5, 0.3, 0.7, 1.0, 1.5, 50.0]),
    top_k=st.sampled_from([0, -1, 1, 2, 5, 9, 30, 1000]),
    top_p=st.sampled_from([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999]),
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
        logits = np.round(logits)
        logits[logits == 0] *= -1  # some zeros are negative
    if kind == "masked":
        logits[rng.random(logits.shape) < 0.7] = -np.inf
    if kind == "broken":
        logits[0] = -np.inf
        logits[-1, rng.integers(vocab_size)] = np.nan
    if kind == "huge":
        logits *= np.float32(1e30)
    return logits


@settings(max_examples=100, deadline=None)
@given(
    rows=ROWS,
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 5, 32, 103]),
    kind=st.sampled_from(["normal", "ties", "masked", "broken", "huge"]),
    narrow=st.sampled_from([4, 1024]),
)
def test_agrees_with_the_naive_sampler(
    rows: list[Any], seed: int, vocab_size: int, kind: str, narrow: int
) -> None:
    logits = make_logits(seed, len(rows), vocab_size, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_rows, "NARROW", narrow)
        tokens, valid = sample(logits, rows)
    with np.errstate(over="ignore", invalid="ignore"):
        for number, row in enumerate(rows):
            expected, close = naive(logits[number], *row)
            assert valid[number] == (expected is not None)
            if expected is not None and not close:
                assert tokens[number] == expected, row


def test_alone_in_company_and_reordered() -> None:
    """A vocabulary and row counts at which kernels would choose other orders of summation."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (48, 5000)).astype(np.float32)
    choices = [
        {"temperature": 0.0},
        {},
        {"top_k": 40},
        {"top_k": 2000, "top_p": 0.7},
        {"top_p": 0.9},
        {"top_p": 0.99, "min_p": 0.001},
        {"min_p": 0.05},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ]
    rows = [(SamplingParams(**choices[i % 8]), i * 7919, i + 5, i % 3) for i in range(48)]
    together, _ = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [rows[i]])[0][0] for i in range(48)]
    assert together == alone
    order = rng.permutation(48)
    reordered, _ = sample(logits[order], [rows[i] for i in order])
    assert reordered == [together[i] for i in order]
    assert len(set(together)) > 24  # the draws do differ


def test_one_way_gives_the_tokens_of_another() -> None:
    """top_k and top_p that keep everything take the way of candidates, and change nothing."""
    logits = np.random.default_rng(1).normal(0, 1, (16, 3001)).astype(np.float32)
    plain = sample(logits, [(SamplingParams(), i, 9, 0) for i in range(16)])
    for params in (SamplingParams(top_k=3000), SamplingParams(top_p=0.9999999)):
        assert sample(logits, [(params, i, 9, 0) for i in range(16)]) == plain


def test_the_contract_is_met_word_for_word() -> None:
    logits = np.random.default_rng(2).normal(0, 2, (8, 1001)).astype(np.float32)
    tokens, _ = sample(logits, [(SamplingParams(temperature=0.8), 11, p, 2) for p in range(8)])
    expected = [
        int((logits[p] / np.float32(0.8) + gumbel(11, p, 2, np.arange(1001))).argmax())
        for p in range(8)
    ]
    assert tokens == expected


@pytest.mark.parametrize("vocab_size", [1, 3, 64, 1003])
@pytest.mark.parametrize("spread", [1.0, 20.0, 1e6])
def test_noise_where_a_token_can_win_is_enough(vocab_size: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    scaled = torch.randn(32, vocab_size, generator=generator) * spread
    scaled[0] = -torch.inf
    scaled[1] = 0.0
    keys = noise.DrawKeys(*(torch.arange(32) * step for step in (2**40 + 1, 3, 1)))
    everywhere = noise.draw_everywhere(scaled, keys)
    assert noise.draw_where_possible(scaled, keys).tolist() == everywhere.tolist()
    assert noise.draw_all(scaled, keys).tolist() == everywhere.tolist()


def test_torch_noise_has_the_bits_of_numpy() -> None:
    keys = noise.DrawKeys(
        torch.tensor([0, -1, 2**62 + 12345]), torch.tensor([0, 7, 2**31]), torch.tensor([0, 1, 9])
    )
    blocks = torch.arange(500).unsqueeze(0)
    ours = noise.gumbel_of(torch.stack(noise.philox_words(keys, blocks), dim=-1)).flatten(1)
    theirs = noise.noise_at(keys, torch.arange(2000).repeat(3, 1))
    assert (ours == theirs).all()


@pytest.mark.parametrize("num", [1, 7, 64])
def test_torch_and_numpy_find_the_same_top_tokens(num: int) -> None:
    values = torch.from_numpy(make_logits(6, 9, 64, "ties"))
    keys = token_order.order_keys(values)
    expected = [sorted(range(64), key=lambda t: (-row[t], t))[:num] for row in values.tolist()]
    assert token_order.top_tokens(values, num).tolist() == expected
    turned = [sorted(range(64), key=lambda t: -row[t])[:num] for row in keys.tolist()]
    assert turned == expected
    largest = token_order.largest(keys, num)
    assert torch.equal(keys.gather(1, torch.tensor(expected)), largest)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_gives_the_tokens_of_the_cpu() -> None:
    logits = make_logits(7, 40, 5001, "ties")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 20, "top_p": 0.9},
        {"top_p": 0.99, "temperature": 3.0},
        {"min_p": 0.05},
    ]
    rows = [(SamplingParams(**kinds[i % 5]), i * 2**40, i, i % 2) for i in range(40)]
    expected, _ = sample(logits, rows)
    for count in (1, 40):
        batch = make_batch(5001, rows[:count], "cuda")
        result = make_sampler(5001).sample(torch.from_numpy(logits[:count]).cuda(), batch)
        assert result.token_ids.tolist() == expected[:count]
        assert result.valid.all()
    tokens = torch.tensor(expected)
    ours = make_sampler(5001).logprobs(torch.from_numpy(logits).cuda(), tokens.cuda(), 9)
    theirs = make_sampler(5001).logprobs(torch.from_numpy(logits), tokens, 9)
    assert torch.equal(ours.token_ids.cpu(), theirs.token_ids)
    assert torch.equal(ours.ranks.cpu(), theirs.ranks)
    assert torch.allclose(ours.values.cpu(), theirs.values, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 10, "top_p": 0.9, "min_p": 0.02},
    ],
)
@pytest.mark.parametrize("varying", ["seed", "position", "index"])
def test_draws_follow_softmax(params: dict[str, Any], varying: str) -> None:
    vocab_size, draws = 16, 8192
    logits = np.random.default_rng(3).normal(0, 1.5, vocab_size).astype(np.float32)
    chosen = SamplingParams(**params)
    scaled = logits.astype(np.float64) / chosen.temperature
    weight = np.exp(scaled - scaled.max())
    order = np.argsort(-weight)
    if chosen.top_k:
        weight[order[chosen.top_k :]] = 0
    mass = weight[order].cumsum() / weight.sum()
    weight[order[1:][mass[:-1] >= chosen.top_p]] = 0
    weight[weight < chosen.min_p] = 0
    expected = weight / weight.sum() * draws
    names = ("seed", "position", "index")
    rows = [
        (chosen, *(number if name == varying else 1 for name in names)) for number in range(draws)
    ]
    tokens, valid = sample(np.tile(logits, (draws, 1)), rows)
    assert all(valid)
    counts = np.bincount(tokens, minlength=vocab_size)
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4


def row(**params: Any) -> tuple[SamplingParams, int, int, int]:
    return SamplingParams(**params), 1, 1, 0


def test_greedy_ties_go_to_the_lower_id() -> None:
    logits = np.array([[0, 3, 3, 1], [2, 2, 2, 2]], np.float32)
    assert sample(logits, [row(temperature=0), row(temperature=0)]) == ([1, 0], [True, True])


def test_top_k_and_top_p_ties_keep_the_lower_ids() -> None:
    logits = np.zeros((64, 8), np.float32)
    seeds = range(64)
    two = {*sample(logits, [(SamplingParams(top_k=2), seed, 0, 0) for seed in seeds])[0]}
    half = {*sample(logits, [(SamplingParams(top_p=0.5), seed, 0, 0) for seed in seeds])[0]}
    least = {*sample(logits, [(SamplingParams(top_p=1e-12), seed, 0, 0) for seed in seeds])[0]}
    assert (two, half, least) == ({0, 1}, {0, 1, 2, 3}, {0})


def test_rows_without_an_allowed_token_fail_alone() -> None:
    logits = np.zeros((9, 6), np.float32)
    logits[:4] = -np.inf
    logits[4:8, 3] = np.nan
    logits[8, 2] = 5
    kinds = [row(temperature=0), row(), row(top_k=2), row(top_p=0.5)]
    tokens, valid = sample(logits, [*kinds, *kinds, row(temperature=0)])
    assert valid == [False] * 8 + [True]
    assert tokens[8] == 2


def test_infinity_counts_as_the_largest_number() -> None:
    logits = np.zeros((4, 6), np.float32)
    logits[:, 4] = np.inf
    kinds = [row(temperature=0), row(temperature=0.01), row(top_k=2), row(top_p=0.5, min_p=0.5)]
    assert sample(logits, kinds) == ([4] * 4, [True] * 4)


def test_an_empty_batch() -> None:
    assert sample(np.zeros((0, 6), np.float32), []) == ([], [])


def test_an_all_greedy_batch_does_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> Any:
        raise AssertionError("a greedy batch has no business here")

    monkeypatch.setattr(torch_sampler, "select_rows", refuse)
    logits = np.array([[0, 1], [1, 0]], np.float32)
    assert sample(logits, [row(temperature=0)] * 2)[0] == [1, 0]


# ---- logprobs -----------------------------------------------------------------------------------


def logprobs(logits: np.ndarray, tokens: list[int], num: int) -> Any:
    sampler = make_sampler(logits.shape[1])
    return sampler.logprobs(torch.from_numpy(logits), torch.tensor(tokens), num)


@pytest.mark.parametrize("num", [0, 1, 5, 40])
def test_logprobs_against_the_definition(num: int) -> None:
    logits = np.round(np.random.default_rng(4).normal(0, 2, (7, 40)) * 2).astype(np.float32) / 2
    tokens = [0, 39, 3, 7, 7, 20, 11]
    result = logprobs(logits, tokens, num)
    assert result.token_ids.shape == result.values.shape == (7, 1 + num)
    for number, token in enumerate(tokens):
        order = sorted(range(40), key=lambda t: (-logits[number, t], t))
        exact = logits[number].astype(np.float64)
        exact -= np.log(np.exp(exact).sum())
        ids = result.token_ids[number].tolist()
        assert ids == [token, *order[:num]]
        assert result.ranks[number] == order.index(token) + 1
        assert result.values[number].numpy() == pytest.approx(exact[ids], abs=1e-5)


def test_logprobs_of_masked_tokens() -> None:
    result = logprobs(np.array([[-np.inf, 0.0, -np.inf]], np.float32), [2], 3)
    assert result.token_ids.tolist() == [[2, 1, 0, 2]]
    assert result.values.tolist() == [[-math.inf, 0.0, -math.inf, -math.inf]]
    assert result.ranks.tolist() == [3]


def test_logprobs_are_the_same_alone_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.random.default_rng(5).normal(0, 2, (33, 3000)).astype(np.float32)
    tokens = list(range(33))
    together = logprobs(logits, tokens, 4)
    monkeypatch.setattr(token_order, "_ELEMENTS", 3000 * 5)
    pieces = logprobs(logits, tokens, 4)
    alone = [logprobs(logits[i : i + 1], [i], 4) for i in range(33)]
    for name in ("token_ids", "values", "ranks"):
        whole = getattr(together, name)
        assert torch.equal(whole, getattr(pieces, name))
        assert torch.equal(whole, torch.cat([getattr(one, name) for one in alone]))


def test_logprobs_of_nothing() -> None:
    result = logprobs(np.zeros((0, 10), np.float32), [], 2)
    assert result.token_ids.shape == (0, 3)
