"""What every sampler promises: the operations of the contract, to the token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.sampler import Sampler, SamplerContext, SamplingBatch
from octavo.core.messages import AdmittedRow
from octavo.core.sampling_params import SamplingParams
from octavo.kernels import gumbel, token_logprobs
from octavo.testing.conformance import engine_run
from octavo.testing.conformance.base import ConformanceSuite

ROWS = 24
Draw = tuple[SamplingParams, int, int, int]
"""Parameters, seed, position and index of a row."""


def reference(logits: NDArray[np.float32], draw: Draw) -> int | None:
    """The contract's formula for one row, with Python's own integers; None: nothing allowed."""
    params, seed, position, index = draw
    if np.isnan(logits).any() or (logits == -np.inf).all():
        return None
    tokens = [t for t in range(len(logits)) if logits[t] > -np.inf]
    order = sorted(tokens, key=lambda t: (-logits[t], t))
    if params.greedy:
        return order[0]
    with np.errstate(over="ignore"):
        scaled = np.minimum(logits / np.float32(params.temperature), np.finfo(np.float32).max)
    order.sort(key=lambda t: (-scaled[t], t))
    if params.top_k > 0:
        order = order[: params.top_k]
    top = float(scaled[order[0]])
    if params.top_p < 1:
        weights = {t: round(2**40 * float(np.exp(float(scaled[t]) - top))) for t in order}
        needed = np.ceil(float(np.float32(params.top_p)) * sum(weights.values()))
        kept, mass = [], 0
        for t in order:
            kept.append(t)
            mass += weights[t]
            if mass >= needed:
                break
        order = kept
    if params.min_p > 0:
        least = top + float(np.log(float(np.float32(params.min_p))))
        order = [t for t in order if float(scaled[t]) >= least]
    score = {t: scaled[t] + gumbel(seed, position, index, t) for t in order}
    return min(score, key=lambda t: (-score[t], t))


def _token(token: int | None) -> str:
    return "no token (valid is False)" if token is None else f"token {token}"


def _drawn(draw: Draw) -> str:
    """A row's parameters and the draw's numbers, for messages."""
    params, seed, position, index = draw
    names = ("temperature", "top_k", "top_p", "min_p")
    shown = ", ".join(f"{name} {getattr(params, name)}" for name in names)
    return f"{shown}, seed {seed}, position {position}, index {index}"


def make_batch(vocab_size: int, draws: Sequence[Draw], device: str = "cpu") -> SamplingBatch:
    """The batch that a worker would hand over."""
    from octavo.engine.worker.sampling_state import SamplingState

    state = SamplingState(max(1, len(draws)), vocab_size, device)
    for slot, (params, seed, _, index) in enumerate(draws):
        state.attach(
            AdmittedRow(
                slot=slot,
                handle=slot,
                token_ids=np.array([0], np.int32),
                num_prompt=1,
                num_computed=0,
                blocks=np.zeros((1, 1), np.int32),
                sampling=params,
                seed=seed,
                index=index,
            )
        )
    positions = np.array([position for _, _, position, _ in draws], np.int64)
    return state.batch(np.arange(len(draws), dtype=np.intp), positions)


class SamplerSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `Sampler` for the context)."""

    kind = "sampler"

    def sampler(self, vocab_size: int) -> Sampler:
        """The sampler under test on the CPU."""
        import torch

        sampler = self.make(SamplerContext(vocab_size, ROWS, torch.device("cpu")))
        assert isinstance(sampler, Sampler), f"make returned {type(sampler).__name__}"
        return sampler

    def draw(self, logits: NDArray[np.float32], draws: list[Draw]) -> list[int | None]:
        """Tokens of a batch; None where the sampler says that none is valid."""
        import torch

        vocab_size = logits.shape[1]
        result = self.sampler(vocab_size).sample(
            torch.from_numpy(logits.copy()), make_batch(vocab_size, draws)
        )
        assert result.token_ids.dtype == torch.int64, (
            f"token ids are {result.token_ids.dtype}, expected int64"
        )
        assert result.valid.dtype == torch.bool, f"valid is {result.valid.dtype}, expected bool"
        assert result.token_ids.shape == result.valid.shape == (len(draws),), (
            f"shapes {tuple(result.token_ids.shape)} and {tuple(result.valid.shape)}"
        )
        ids = result.token_ids.tolist()
        assert all(0 <= token < vocab_size for token in ids), f"{ids} are no token ids"
        return [t if ok else None for t, ok in zip(ids, result.valid.tolist(), strict=True)]

    def compare(self, logits: NDArray[np.float32], draws: list[Draw]) -> None:
        """Draw, and compare with `reference` row by row."""
        got = self.draw(logits, draws)
        for row, draw in enumerate(draws):
            wanted = reference(logits[row], draw)
            assert got[row] == wanted, (
                f"row {row} got {_token(got[row])}, expected {_token(wanted)}: {_drawn(draw)}"
            )

    # ---- tokens -----------------------------------------------------------------------------

    def test_greedy_takes_the_largest(self) -> None:
        """Greedy rows take the largest logit, the lower id where several are equal."""
        random = np.random.default_rng(0)
        for vocab_size in (1, 2, 5, 100, 2000):
            logits = random.normal(size=(6, vocab_size)).astype(np.float32)
            logits[1] = 0.0
            logits[2] = np.round(logits[2])
            self.compare(logits, [(SamplingParams(temperature=0), 1, 0, 0)] * 6)

    def test_draws_follow_the_formula(self) -> None:
        """Whatever the parameters, the token is the one of the contract's formula."""
        for seed in range(30):
            random = np.random.default_rng(seed)
            vocab_size = (5, 33, 103, 700)[seed % 4]
            logits = random.normal(0, 3, (12, vocab_size)).astype(np.float32)
            if seed % 5 == 1:
                logits = np.round(logits)
            self.compare(logits, [self._params(random) for _ in range(12)])

    def test_extreme_values_are_harmless(self) -> None:
        """Huge logits, tiny and huge temperatures, and masks of all tokens but one."""
        random = np.random.default_rng(5)
        logits = random.normal(0, 1e30, (8, 50)).astype(np.float32)
        logits[4:] = -np.inf
        logits[4, 7] = logits[5, 0] = logits[6, 49] = 0.0
        logits[7, 11:13] = 1.0
        for temperature in (1e-12, 1e-4, 1.0, 50.0):
            params = SamplingParams(temperature=temperature)
            self.compare(logits, [(params, seed, 3, 0) for seed in range(8)])

    def test_a_row_without_a_token_is_marked(self) -> None:
        """A row of -inf or with NaN is not valid, and the rows beside it are untouched."""
        random = np.random.default_rng(6)
        logits = random.normal(size=(5, 40)).astype(np.float32)
        logits[1], logits[3, 4] = -np.inf, np.nan
        for temperature in (0.0, 0.8):
            params = SamplingParams(temperature=temperature)
            self.compare(logits, [(params, 9, 2, 0)] * 5)

    def test_company_does_not_matter(self) -> None:
        """A row gets the same token alone, in any company and in any place of the batch."""
        random = np.random.default_rng(7)
        logits = random.normal(0, 2, (10, 300)).astype(np.float32)
        draws = [self._params(random) for _ in range(10)]
        together = self.draw(logits, draws)
        for row in range(10):
            alone = self.draw(logits[row : row + 1], draws[row : row + 1])
            assert alone == [together[row]], f"row {row}: {alone} alone, {together[row]} together"
        order = random.permutation(10)
        moved = self.draw(logits[order], [draws[row] for row in order])
        assert moved == [together[row] for row in order], "the place in the batch matters"

    def test_seed_position_and_index_matter(self) -> None:
        """Another seed, position or index gives other draws, all 64 bits of the seed counting."""
        logits = np.zeros((16, 300), np.float32)
        params = SamplingParams(temperature=1.0)
        for name, draws in {
            "seed": [(params, seed, 0, 0) for seed in range(16)],
            "upper half of the seed": [(params, seed << 40, 0, 0) for seed in range(16)],
            "position": [(params, 3, position, 0) for position in range(16)],
            "index": [(params, 3, 0, index) for index in range(16)],
        }.items():
            tokens = self.draw(logits, draws)
            assert len(set(tokens)) > 8, f"draws hardly depend on the {name}: {tokens}"
            self.compare(logits, draws)

    def test_the_same_batch_draws_the_same(self) -> None:
        """Nothing is remembered between draws."""
        import torch

        random = np.random.default_rng(8)
        logits = random.normal(0, 2, (9, 200)).astype(np.float32)
        draws = [self._params(random) for _ in range(9)]
        sampler, batch = self.sampler(200), make_batch(200, draws)
        first = sampler.sample(torch.from_numpy(logits.copy()), batch).token_ids.tolist()
        other = np.ascontiguousarray(logits[::-1])
        sampler.sample(torch.from_numpy(other), make_batch(200, draws[::-1]))
        again = sampler.sample(torch.from_numpy(logits.copy()), batch).token_ids.tolist()
        assert first == again, "a second draw of the same batch gives other tokens"

    # ---- logprobs ---------------------------------------------------------------------------

    def test_logprobs_are_those_of_the_raw_logits(self) -> None:
        """Logprobs, ranks and alternatives are those of a float64 log-softmax."""
        import torch

        random = np.random.default_rng(9)
        for vocab_size, num in ((1, 1), (7, 0), (50, 5), (50, 50), (900, 20)):
            logits = random.normal(0, 3, (6, vocab_size)).astype(np.float32)
            tokens = random.integers(0, vocab_size, 6)
            given = torch.from_numpy(logits.copy()), torch.from_numpy(tokens), num
            result = self.sampler(vocab_size).logprobs(*given)
            if result is None:  # left to the engine
                result = token_logprobs(*given)
            self._check_logprobs(result, logits, tokens, num)

    def test_engine_gives_the_tokens_of_torch(self) -> None:
        """A real engine gives the tokens that it gives with the reference sampler `torch`."""
        engine_run.compare_engines(self, {}, {"sampler": {"backend": "torch"}})

    @staticmethod
    def _check_logprobs(
        result: Any, logits: NDArray[np.float32], tokens: NDArray[np.int64], num: int
    ) -> None:
        import torch

        exact = torch.from_numpy(logits).double().log_softmax(-1).numpy()
        rows = len(tokens)
        assert tuple(result.token_ids.shape) == (rows, 1 + num), f"{result.token_ids.shape}"
        assert tuple(result.values.shape) == (rows, 1 + num), f"{result.values.shape}"
        assert result.token_ids.dtype == torch.int64, f"token ids are {result.token_ids.dtype}"
        assert result.values.dtype == torch.float32, f"values are {result.values.dtype}"
        for row in range(rows):
            order = sorted(range(logits.shape[1]), key=lambda t: (-logits[row, t], t))
            wanted = [int(tokens[row]), *order[:num]]
            got = result.token_ids[row].tolist()
            assert got == wanted, f"row {row}: tokens {got}, expected {wanted}"
            rank = 1 + order.index(int(tokens[row]))
            assert int(result.ranks[row]) == rank, (
                f"row {row}: rank is {int(result.ranks[row])}, expected {rank}"
            )
            error = np.abs(result.values[row].numpy() - exact[row, wanted]).max()
            assert error < 1e-4, f"row {row}: logprobs differ by {error:.3g}"

    @staticmethod
    def _params(random: np.random.Generator) -> Draw:
        params = SamplingParams(
            temperature=float(random.choice([0.0, 1e-9, 0.3, 0.7, 1.0, 1.5, 50.0])),
            top_k=int(random.choice([0, -1, 1, 2, 5, 30, 1000])),
            top_p=float(random.choice([1.0, 1e-9, 0.1, 0.5, 0.9, 0.999])),
            min_p=float(random.choice([0.0, 0.0, 0.01, 0.2, 1.0])),
        )
        seed = int(random.integers(0, 2**63)) * 2 + int(random.integers(2))
        return params, seed, int(random.integers(0, 2**17)), int(random.integers(4))
