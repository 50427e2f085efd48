"""Scheduler policy `deadline`: the earliest deadline first, with targets a class.

A class is a priority number. A request's deadline is its arrival plus its class's time-to-first-
token target; deadlines do not move, so nothing starves. Chunks of prefill are cut so that a step is
foreseen to take no longer than the tightest inter-token target among the sequences that decode:
the cost of a step is measured while serving (see `step_time`). `min_chunk` tokens are always let
through, so that prompts go on when a target cannot be kept at all.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from octavo.core.contracts.provider import Options
from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.plugins.scheduler_policies.queue import QueuePolicy
from octavo.plugins.scheduler_policies.step_time import StepTimeModel

_UNLIMITED = 2**31


class Targets(Options):
    """Latency targets of a class, in seconds."""

    ttft_s: float = Field(default=1.0, gt=0, description="Target time from arrival to first token.")
    itl_s: float = Field(default=0.2, gt=0, description="Target time between two tokens.")


class DeadlineOptions(Options):
    """Latency targets by class."""

    classes: dict[int, Targets] = Field(
        default_factory=dict,
        description="Targets (`ttft_s`, `itl_s`) by request priority number.",
    )
    default: Targets = Field(
        default_factory=Targets, description="Targets of all other priorities."
    )
    min_chunk: int = Field(
        default=16,
        gt=0,
        description="Prefill tokens allowed in every step, even when targets are missed.",
    )


class DeadlinePolicy(QueuePolicy):
    """Orders by deadline, and limits prefill beside decoding sequences."""

    def __init__(self, options: DeadlineOptions, context: SchedulerPolicyContext) -> None:
        super().__init__()
        self._options = options
        self.cost = StepTimeModel()
        self._room = _UNLIMITED  # prefill tokens left in this step
        self._offer = 0  # what `admit_cap` last let through
        self._step: tuple[float, int, int] | None = None  # start, prefill tokens, a handle

    def _targets(self, priority: int) -> Targets:
        return self._options.classes.get(priority, self._options.default)

    def _of(self, priority: NDArray[np.int64], name: str) -> NDArray[np.float64]:
        """A target of each request, float64[B]."""
        values = np.full(len(priority), getattr(self._options.default, name))
        for number, targets in self._options.classes.items():
            values[priority == number] = getattr(targets, name)
        return values

    # ---- order ----------------------------------------------------------------------------------

    def key(self, request: WaitingRequest) -> float:
        return request.arrival + self._targets(request.priority).ttft_s

    def pop(self) -> WaitingRequest:
        self._room -= self._offer
        return super().pop()

    def take(self, request: WaitingRequest) -> None:
        self._room -= self._offer
        super().take(request)

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        return view.arrival + self._of(view.priority, "ttft_s")

    def order(self, view: RunningView) -> NDArray[np.intp] | None:
        if len(view.slots) < 2:
            return None
        return np.argsort(self.victim_keys(view), kind="stable")

    def class_of(self, request: WaitingRequest) -> Hashable:
        return request.priority

    def classes(self, view: RunningView) -> NDArray[np.int64] | None:
        return view.priority

    # ---- chunks ---------------------------------------------------------------------------------

    def cap(self, view: RunningView, want: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if self._room >= _UNLIMITED:
            return None
        order = self.order(view)
        ordered = want if order is None else want[order]
        before = np.cumsum(ordered) - ordered
        given: NDArray[np.int64] = np.clip(self._room - before, 0, ordered)
        self._room -= int(given.sum())
        if order is None:
            return given
        caps = np.empty_like(given)
        caps[order] = given
        return caps

    def admit_cap(self, request: WaitingRequest, want: int) -> int:
        self._offer = 0 if self._room >= _UNLIMITED else max(0, min(want, self._room))
        return want if self._room >= _UNLIMITED else self._offer

    def on_step(self, view: RunningView, scheduled: NDArray[np.int64]) -> None:
        """Measure the step before this one; set the room of the one after it."""
        if self._step is not None:
            started, num_prefill, handle = self._step
            if (view.handles == handle).any():  # else there may have been a pause
                self.cost.add(view.now - started, num_prefill)
        decodes = view.num_computed >= view.num_tokens  # these sample now, and decode after
        one_token = (scheduled == 1) & decodes
        num_prefill = int(scheduled[~one_token].sum())
        self._step = (view.now, num_prefill, int(view.handles[-1]))
        room = None
        if decodes.any():
            tightest = float(self._of(view.priority[decodes], "itl_s").min())
            room = self.cost.prefill_tokens(tightest)
        self._room = _UNLIMITED if room is None else max(room, self._options.min_chunk)
