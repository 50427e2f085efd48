"""Scheduler policy `priority`: lower numbers first, with ageing.

The key of a request is `arrival + priority * ageing_s`: a request of one class lower goes before a
better one that arrived more than `ageing_s` later, so no class starves, and the order of two
requests never changes with time.
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


class PriorityOptions(Options):
    """Ageing and preemption."""

    ageing_s: float = Field(
        default=60.0,
        gt=0,
        description="Head start of one class over the next, in seconds: a request goes before one "
        "of the next better class that arrived more than this much later.",
    )
    preempt: bool = Field(
        default=True,
        description="Whether a waiting request may preempt a running one of a lower class when "
        "slots or blocks run out.",
    )


class PriorityPolicy(QueuePolicy):
    """Orders by priority and age. A class is one priority number."""

    def __init__(self, options: PriorityOptions, context: SchedulerPolicyContext) -> None:
        super().__init__()
        self._ageing, self._preempt = options.ageing_s, options.preempt

    def key(self, request: WaitingRequest) -> float:
        return request.arrival + request.priority * self._ageing

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        return view.arrival + view.priority * self._ageing

    def order(self, view: RunningView) -> NDArray[np.intp] | None:
        if len(view.slots) < 2:
            return None
        return np.argsort(self.victim_keys(view), kind="stable")

    def preempts(self, request: WaitingRequest, view: RunningView) -> int | None:
        """The running request with the largest key, if its class is lower and it is not older by so
        much that it would go first anyway: what was once preempted comes back for good."""
        if not self._preempt:
            return None
        keys = np.where(view.priority > request.priority, self.victim_keys(view), -np.inf)
        worst = int(np.argmax(keys))
        return int(view.slots[worst]) if keys[worst] > self.key(request) else None

    def class_of(self, request: WaitingRequest) -> Hashable:
        return request.priority

    def classes(self, view: RunningView) -> NDArray[np.int64] | None:
        return view.priority
