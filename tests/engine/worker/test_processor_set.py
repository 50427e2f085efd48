"""The set of logits processors: who is called for what, and who pays for errors."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch

from octavo.core.contracts.logits_processor import AttachedRequest, DeviceLogitsProcessor
from octavo.core.errors import RequestError
from octavo.core.messages import AdmittedRow
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.sampling_state import ProcessorSet


class Adder(DeviceLogitsProcessor):
    """Adds `extra_args[key]` to every logit, and notes what it is called with."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.values: dict[int, float] = {}
        self.requests: list[AttachedRequest] = []
        self.accepted: list[tuple[list[int], list[int]]] = []
        self.rolled_back: list[tuple[int, int]] = []

    def attach(self, request: AttachedRequest) -> bool:
        value = (request.params.extra_args or {}).get(self.key)
        if value is None:
            return False
        if value == "refuse":
            raise RequestError(f"{self.key} must not be 'refuse'", param=self.key)
        if value == "break":
            raise ZeroDivisionError("broken")
        assert request.slot not in self.values, "a slot was attached twice"
        self.requests.append(request)
        self.values[request.slot] = value
        return True

    def apply(self, logits: torch.Tensor, slots: Any, rows: Any) -> None:
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            if self.values[slot] == "explode":
                raise KeyError("explode")
            logits[row] += self.values[slot]

    def accept(self, slots: Any, token_ids: Any) -> None:
        self.accepted.append((slots.tolist(), token_ids.tolist()))

    def rollback(self, slot: int, num_tokens: int) -> None:
        self.rolled_back.append((slot, num_tokens))

    def detach(self, slot: int) -> None:
        del self.values[slot]


def admitted(slot: int, num_prompt: int = 2, ignore_eos: bool = False, **extra: Any) -> AdmittedRow:
    return AdmittedRow(
        slot=slot,
        handle=slot + 100,
        token_ids=np.array([1, 2, 3], np.int32),
        num_prompt=num_prompt,
        num_computed=0,
        blocks=np.zeros((1, 1), np.int32),
        sampling=SamplingParams(extra_args=extra, ignore_eos=ignore_eos),
        seed=0,
        eos_token_ids=[7],
    )


def slots(*values: int) -> Any:
    return np.array(values, np.intp)


@pytest.fixture
def adders() -> tuple[Adder, Adder]:
    return Adder("a"), Adder("b")


@pytest.fixture
def processors(adders: tuple[Adder, Adder]) -> ProcessorSet:
    return ProcessorSet(adders, 8, names=("first", "second"))


def test_requests_are_split_into_prompt_and_output(
    processors: ProcessorSet, adders: tuple[Adder, Adder]
) -> None:
    processors.attach(admitted(4, a=1.0))
    processors.attach(admitted(5, num_prompt=3, ignore_eos=True, a=1.0))
    first, second = adders[0].requests
    assert (first.prompt.tolist(), first.output.tolist()) == ([1, 2], [3])
    assert (first.slot, first.handle, first.eos_token_ids) == (4, 104, (7,))
    assert second.output.tolist() == []
    assert second.eos_token_ids == ()


def test_each_is_called_for_its_own_rows_only(
    processors: ProcessorSet, adders: tuple[Adder, Adder]
) -> None:
    assert not processors.active
    processors.attach(admitted(0, a=1.0))
    processors.attach(admitted(1))
    processors.attach(admitted(2, a=10.0, b=100.0))
    assert processors.active
    logits = torch.zeros(3, 2)
    processors.apply(logits, slots(2, 1, 0))
    assert logits[:, 0].tolist() == [110.0, 0.0, 1.0]
    processors.accept(slots(2, 1, 0), np.array([7, 8, 9], np.int32))
    assert adders[0].accepted == [([2, 0], [7, 9])]
    assert adders[1].accepted == [([2], [7])]
    processors.rollback(2, 1)
    processors.rollback(1, 1)
    assert adders[0].rolled_back == adders[1].rolled_back == [(2, 1)]


def test_release(processors: ProcessorSet, adders: tuple[Adder, Adder]) -> None:
    processors.attach(admitted(0, a=1.0, b=1.0))
    processors.attach(admitted(0, b=2.0))  # the slot's next user, without a release between
    assert adders[0].values == {}
    processors.release(0)
    processors.release(0)
    assert adders[1].values == {}
    assert not processors.active


def test_a_refused_request_fails_alone(
    processors: ProcessorSet, adders: tuple[Adder, Adder], caplog: pytest.LogCaptureFixture
) -> None:
    processors.attach(admitted(0, a=1.0, b="refuse"))
    processors.attach(admitted(1, a=2.0))
    assert processors.errors == {0: ("b must not be 'refuse'", False)}
    assert adders[0].values == {1: 2.0}
    logits = torch.zeros(2, 2)
    processors.apply(logits, slots(0, 1))
    assert logits[:, 0].tolist() == [0.0, 2.0]
    assert not caplog.records
    processors.release(0)
    assert not processors.errors


def test_a_broken_processor_fails_its_requests_only(
    processors: ProcessorSet, adders: tuple[Adder, Adder], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        processors.attach(admitted(0, a="break"))
        processors.attach(admitted(1, a="explode", b=1.0))
        processors.attach(admitted(2, b=1.0))
        logits = torch.zeros(3, 2)
        processors.apply(logits, slots(0, 1, 2))
    assert processors.errors == {
        0: ("logits processor 'first' failed: ZeroDivisionError: broken", True),
        1: ("logits processor 'first' failed: KeyError: 'explode'", True),
    }
    assert logits[2].tolist() == [1.0, 1.0]
    assert len(caplog.records) == 1
    assert "'first'" in caplog.text
    assert adders[1].values == {2: 1.0}
    processors.attach(admitted(1, b=5.0))
    assert 1 not in processors.errors


def test_names_must_match() -> None:
    with pytest.raises(ValueError, match="1 processors, but 2 names"):
        ProcessorSet([Adder("a")], 4, names=("x", "y"))
