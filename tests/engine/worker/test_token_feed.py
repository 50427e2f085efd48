"""Tokens that stay on the device, with several steps unfinished."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.contracts.sampler import SampledTokens
from octavo.core.messages import AdmittedRow
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.clock import CudaClock
from octavo.engine.worker.mirror import Mirror
from octavo.engine.worker.processors import ProcessorSet
from octavo.engine.worker.sampling_state import SamplingState
from octavo.engine.worker.sampling_step import SamplingStep
from octavo.engine.worker.token_feed import TokenFeed

CPU = torch.device("cpu")


class Counting:
    """A sampler whose tokens are 100, 101, ... in the order of drawing; `invalid` rows fail."""

    def __init__(self):
        self.next, self.invalid = 100, set()

    def sample(self, logits, batch):
        rows = len(logits)
        token_ids = torch.arange(self.next, self.next + rows)
        self.next += rows
        return SampledTokens(token_ids, torch.tensor([i not in self.invalid for i in range(rows)]))


@pytest.fixture
def setup():
    mirror = Mirror(num_slots=6, max_model_len=40, block_size=4)
    state, sampler = SamplingState(6, 200, CPU), Counting()
    for slot in range(6):
        row = AdmittedRow(
            slot=slot,
            handle=slot,
            token_ids=np.asarray([1, 10 + slot], np.int32),
            num_prompt=2,
            num_computed=1,
            blocks=np.ones((1, 1), np.int32),
            sampling=SamplingParams(temperature=0.0),
            seed=0,
        )
        mirror._admit(row)
        state.attach(row)
    step = SamplingStep(mirror, state, ProcessorSet([], 6), sampler)
    return mirror, step, TokenFeed(6, CPU), sampler


def slots(*numbers):
    return np.asarray(numbers, np.intp)


def launch(step, *numbers):
    return step.launch(slots(*numbers), lambda: torch.zeros(len(numbers), 200), None)


def test_three_steps_ahead(setup):
    """Rows that skip a step still get the token that they sampled last."""
    mirror, step, feed, _ = setup
    first = launch(step, 0, 2, 4)  # 100, 101, 102
    step.reserve()
    second = launch(step, 4, 0)  # 103, 104; slot 2 waits
    step.reserve()
    assert mirror.last_token.tolist() == [-1, 11, -3, 13, -5, 15]
    assert mirror.num_tokens.tolist() == [4, 2, 3, 2, 4, 2]
    batch = torch.tensor([-3, -1, 7, -5, 11])
    feed.fill(batch, slots(2, 0, 3, 4, 1), step.unfinished, decodes_only=False)
    assert batch.tolist() == [101, 104, 7, 103, 11]

    step.finish(first)
    assert mirror.token_ids[[0, 2, 4], 2].tolist() == [100, 101, 102]
    assert mirror.last_token.tolist() == [-1, 11, 101, 13, -5, 15]
    batch = torch.tensor([101, -1, -5])
    feed.fill(batch, slots(2, 0, 4), step.unfinished, decodes_only=False)
    assert batch.tolist() == [101, 104, 103]
    step.finish(second)
    assert mirror.last_token.tolist() == [104, 11, 101, 13, 103, 15]
    assert not step.unfinished


def test_the_same_rows_again_take_the_tokens_as_they_are(setup):
    _, step, feed, _ = setup
    launch(step, 3, 1)
    step.reserve()
    batch = torch.tensor([-4, -2, 0, 0])  # two rows of padding
    feed.fill(batch, slots(3, 1), step.unfinished, decodes_only=True)
    assert batch.tolist() == [100, 101, 0, 0]


def test_steps_finish_in_order(setup):
    _, step, _, _ = setup
    launch(step, 0)
    second = launch(step, 1)
    with pytest.raises(AssertionError, match="in the order of their launch"):
        step.finish(second)


def test_rows_that_cannot_be_sampled_are_errors_of_their_own(setup):
    _, step, _, sampler = setup
    sampler.invalid = {1}
    finished = step.finish(launch(step, 0, 1, 2))
    assert finished.errors.keys() == {1}
    assert "no token can be sampled" in finished.errors[1].message
    assert finished.errors[1].fault
    assert finished.token_ids.tolist() == [100, 101, 102]


def test_device_times_are_those_between_two_events():
    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            assert enable_timing
            self.waited = False

        def record(self):
            Event.now += 4.0
            self.at = Event.now

        def synchronize(self):
            self.waited = True

        def elapsed_time(self, end):
            assert end.waited
            return end.at - self.at

    clock = CudaClock(type("Cuda", (), {"Event": Event}))
    begin, end = clock.mark(), clock.mark()
    assert clock.seconds(begin, end) == pytest.approx(4e-3)
