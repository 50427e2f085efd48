"""Scheduler policy `class_quotas`: classes of requests share the slots by weight, within quotas.

A request's class is its `priority` number (OpenAI's field): give your gold, silver and free tiers
numbers, and say here what each is worth. Of the classes that wait and are below their quota, the one
goes next that has been served least for its weight (stride scheduling; Waldspurger and Weihl, 1995).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from octavo.core.contracts import Options
from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)


class Tier(BaseModel):
    """What one class gets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weight: float = Field(default=1.0, gt=0, description="Share of the admissions.")
    max_running: int | None = Field(
        default=None, ge=1, description="Most requests of the class that run at once."
    )


class ClassQuotasOptions(Options):
    """The classes, by priority number; others are served as `default` says."""

    classes: dict[int, Tier] = Field(default={}, description="Weight and quota by class.")
    default: Tier = Field(default=Tier(), description="Of classes that are not named.")


@dataclass
class _Class:
    """passed: tokens admitted, divided by the weight. running: how many have a slot, as of the last
    step, and those admitted since."""

    tier: Tier
    passed: float = 0.0
    running: int = 0
    queue: OrderedDict[int, WaitingRequest] = field(default_factory=OrderedDict)

    @property
    def is_full(self) -> bool:
        quota = self.tier.max_running
        return quota is not None and self.running >= quota


class ClassQuotasPolicy(SchedulerPolicy):
    """One queue a class, by order of arrival."""

    def __init__(self, options: ClassQuotasOptions, context: SchedulerPolicyContext) -> None:
        self._options = options
        self._classes: dict[int, _Class] = {}
        self._where: dict[int, int] = {}

    def add(self, request: WaitingRequest) -> None:
        number = request.priority
        if number not in self._classes:
            tier = self._options.classes.get(number, self._options.default)
            self._classes[number] = _Class(tier)
        entry = self._classes[number]
        if not entry.queue:  # idle classes save nothing up
            busy = [other.passed for other in self._classes.values() if other.queue]
            entry.passed = max(entry.passed, min(busy, default=entry.passed))
        entry.queue[request.handle] = request
        if request.num_preemptions:
            entry.queue.move_to_end(request.handle, last=False)
        self._where[request.handle] = number

    def remove(self, handle: int) -> bool:
        number = self._where.pop(handle, None)
        if number is None:
            return False
        del self._classes[number].queue[handle]
        return True

    def _next(self) -> _Class | None:
        """The class whose turn it is: of those below their quota, or of all when there is none."""
        waiting = [entry for entry in self._classes.values() if entry.queue]
        able = [entry for entry in waiting if not entry.is_full]
        return min(able or waiting, key=lambda entry: entry.passed, default=None)

    def peek(self) -> WaitingRequest | None:
        entry = self._next()
        return next(iter(entry.queue.values())) if entry is not None else None

    def admit_cap(self, request: WaitingRequest, want: int) -> int:
        return 0 if self._classes[request.priority].is_full else want

    def pop(self) -> WaitingRequest:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.take(request)
        return request

    def take(self, request: WaitingRequest) -> None:
        entry = self._classes[self._where.pop(request.handle)]
        del entry.queue[request.handle]
        entry.passed += request.num_tokens / entry.tier.weight
        entry.running += 1

    def on_step(self, view: RunningView, scheduled: NDArray[np.int64]) -> None:
        for number, entry in self._classes.items():
            entry.running = int((view.priority == number).sum())

    def __len__(self) -> int:
        return len(self._where)

    def waiting(self) -> Iterable[WaitingRequest]:
        return [request for entry in self._classes.values() for request in entry.queue.values()]
