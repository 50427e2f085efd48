"""Per-slot sampling parameters and their gathering into a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from octavo.core.messages import AdmittedRow
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.sampling_state import NO_LOGPROBS, SamplingState

V = 100


def admitted(slot: int, seed: int = 0, index: int = 0, **params: Any) -> AdmittedRow:
    return AdmittedRow(
        slot=slot,
        handle=slot,
        token_ids=np.array([1, 2], np.int32),
        num_prompt=2,
        num_computed=0,
        blocks=np.zeros((1, 1), np.int32),
        sampling=SamplingParams(**params),
        seed=seed,
        index=index,
    )


@pytest.fixture
def state() -> SamplingState:
    return SamplingState(8, V, "cpu")


def batch_of(state: SamplingState, *slots: int) -> Any:
    return state.batch(np.array(slots, np.intp), np.arange(len(slots)) + 10)


def test_columns_follow_the_order_of_slots(state: SamplingState) -> None:
    state.attach(admitted(3, seed=2**64 - 1, index=2, temperature=0.5, top_k=7))
    state.attach(admitted(1, seed=5, top_p=0.25, min_p=0.125))
    batch = batch_of(state, 1, 3)
    assert batch.num_rows == 2
    assert batch.temperature.tolist() == [1.0, 0.5]
    assert batch.top_k.tolist() == [V, 7]
    assert batch.top_p.tolist() == [0.25, 1.0]
    assert batch.min_p.tolist() == [0.125, 0.0]
    assert batch.seed.tolist() == [5, -1]
    assert batch.index.tolist() == [0, 2]
    assert batch.position.tolist() == [10, 11]
    assert batch.host.top_k.tolist() == [V, 7]
    assert (batch.all_greedy, batch.any_top_k, batch.any_top_p, batch.any_min_p) == (
        False,
        True,
        True,
        True,
    )


def test_addresses_are_fixed(state: SamplingState) -> None:
    state.attach(admitted(0))
    state.attach(admitted(1))
    first, second = batch_of(state, 0), batch_of(state, 1, 0)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position", "index"):
        assert getattr(first, name).data_ptr() == getattr(second, name).data_ptr()


def test_flags_ignore_greedy_rows(state: SamplingState) -> None:
    state.attach(admitted(0, temperature=0, top_k=3, top_p=0.5, min_p=0.5))
    assert batch_of(state, 0).all_greedy
    state.attach(admitted(1))
    batch = batch_of(state, 0, 1)
    assert not batch.all_greedy
    assert (batch.any_top_k, batch.any_top_p, batch.any_min_p) == (False, False, False)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1e-9, 9e-6])
def test_tiny_temperatures_are_greedy(state: SamplingState, temperature: float) -> None:
    state.attach(admitted(0, temperature=temperature))
    assert batch_of(state, 0).all_greedy


@pytest.mark.parametrize("top_p", [1e-30, 1e-45, 1e-79, 5e-324])
def test_a_tiny_top_p_keeps_one_token(state: SamplingState, top_p: float) -> None:
    state.attach(admitted(0, top_p=top_p))
    batch = batch_of(state, 0)
    assert 0 < batch.top_p[0] < 1e-29
    assert batch.any_top_p


@pytest.mark.parametrize("top_k", [0, -1, V, V + 1, 10**9])
def test_top_k_that_is_off(state: SamplingState, top_k: int) -> None:
    state.attach(admitted(0, top_k=top_k))
    batch = batch_of(state, 0)
    assert batch.top_k.tolist() == [V]
    assert not batch.any_top_k


def test_logprobs_counts(state: SamplingState) -> None:
    slots = np.arange(4, dtype=np.intp)
    state.attach(admitted(0, temperature=0, logprobs=0))
    state.attach(admitted(1, temperature=0, logprobs=-1))
    state.attach(admitted(2, temperature=0, prompt_logprobs=5))
    assert state.num_logprobs(slots).tolist() == [0, V, NO_LOGPROBS, NO_LOGPROBS]
    assert state.num_prompt_logprobs(slots).tolist() == [NO_LOGPROBS, NO_LOGPROBS, 5, NO_LOGPROBS]
    assert batch_of(state, 0).max_logprobs == 0
    assert batch_of(state, 0, 1).max_logprobs == V
    assert batch_of(state, 2, 3).max_logprobs == NO_LOGPROBS


def test_a_released_slot_keeps_nothing(state: SamplingState) -> None:
    state.attach(admitted(2, temperature=2.0, top_k=1, logprobs=3, prompt_logprobs=1))
    assert state.any_prompt_logprobs
    state.release(2)
    state.release(2)
    assert not state.any_prompt_logprobs
    assert batch_of(state, 2).all_greedy
    assert batch_of(state, 2).max_logprobs == NO_LOGPROBS
    state.attach(admitted(2))
    batch = batch_of(state, 2)
    assert batch.top_k.tolist() == [V]
    assert batch.temperature.tolist() == [1.0]


def test_attaching_again_replaces(state: SamplingState) -> None:
    state.attach(admitted(0, prompt_logprobs=1))
    state.attach(admitted(0, prompt_logprobs=2))
    state.release(0)
    assert not state.any_prompt_logprobs


def test_an_empty_batch(state: SamplingState) -> None:
    batch = batch_of(state)
    assert batch.num_rows == 0
    assert batch.all_greedy
    assert batch.max_logprobs == NO_LOGPROBS
