"""Scheduler policy `fair`: tokens are shared among users by weight, whatever they send.

A virtual token counter a user: every served token (prompt tokens at admission, output tokens as
they are planned) adds `1 / weight`, and the waiting user with the least counter is admitted next.
A user who starts to wait is lifted to the least counter of those who wait, so that nobody saves up
service by being away. (VTC: Sheng et al., "Fairness in Serving Large Language Models", OSDI'24.)

Within a user: first come, first served.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator

from octavo.core.contracts.provider import Options
from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.plugins.scheduler_policies.queue import WaitingQueue

_KEPT_USERS = 4096
"""Users remembered before those who are idle are looked for."""


class FairOptions(Options):
    """User weights and token costs."""

    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Weight of each user. While both have requests waiting, a user of weight 3 "
        "gets three times the tokens of one of weight 1.",
    )
    default_weight: float = Field(
        default=1.0,
        gt=0,
        description="Weight of users not listed, and of anonymous requests, which count as one "
        "user.",
    )
    prompt_cost: float = Field(default=1.0, ge=0, description="Cost of a prompt token.")
    output_cost: float = Field(default=1.0, gt=0, description="Cost of an output token.")

    @field_validator("weights")
    @classmethod
    def _positive(cls, weights: dict[str, float]) -> dict[str, float]:
        for user, weight in weights.items():
            if not 0 < weight < float("inf"):
                raise ValueError(f"expected weights greater than 0, got {weight} for '{user}'")
        return weights


class FairPolicy(SchedulerPolicy):
    """See the module. Users are numbered in order of appearance; `_counters[number]` is float64."""

    def __init__(self, options: FairOptions, context: SchedulerPolicyContext) -> None:
        self._options = options
        self._numbers: dict[str | None, int] = {}
        self._counters = np.zeros(16)
        self._per_token = np.ones(16)  # 1 / weight
        self._queues: dict[int, WaitingQueue] = {}  # of users who have requests waiting
        # (counter, user), one entry a user at most: counters only grow, so an entry that lags is
        # put right when it is met, and one whose user no longer waits is dropped.
        self._heap: list[tuple[float, int]] = []
        self._in_heap: set[int] = set()
        self._user_of: dict[int, int] = {}  # handle of a waiting request to user
        self._last_left = 0.0
        # Our user numbers by those of a view, whose names they were made from.
        self._columns = np.empty(0, np.intp)
        self._names: list[str | None] = []
        self._unused: list[int] = []  # numbers of forgotten users
        self._most = _KEPT_USERS

    # ---- queue ----------------------------------------------------------------------------------

    def add(self, request: WaitingRequest) -> None:
        if len(self._numbers) >= self._most:
            self._forget_idle()
        user = self._number(request.user)
        queue = self._queues.get(user)
        if queue is None:
            self._lift(user)
            queue = self._queues[user] = WaitingQueue()
            if user not in self._in_heap:
                self._in_heap.add(user)
                heapq.heappush(self._heap, (float(self._counters[user]), user))
        queue.add(request.arrival, request)
        self._user_of[request.handle] = user

    def _lift(self, user: int) -> None:
        self._counters[user] = max(float(self._counters[user]), self._floor())

    def _floor(self) -> float:
        """Where a user's counter stands at least when a request of theirs starts to wait."""
        least = self._least_user()
        return self._last_left if least is None else float(self._counters[least])

    def _forget_idle(self) -> None:
        """Forget users who have nothing waiting and would be lifted on their return anyway."""
        floor = self._floor()
        for name, user in list(self._numbers.items()):
            if user not in self._queues and self._counters[user] <= floor:
                del self._numbers[name]
                self._unused.append(user)
        # Those that a view still names come back when it is looked at.
        self._most = max(_KEPT_USERS, 2 * (len(self._numbers) + len(self._names)))
        self._names = []

    def remove(self, handle: int) -> bool:
        user = self._user_of.pop(handle, None)
        if user is None:
            return False
        queue = self._queues[user]
        queue.remove(handle)
        if not len(queue):
            self._leave(user)
        return True

    def peek(self) -> WaitingRequest | None:
        user = self._least_user()
        return None if user is None else self._queues[user].peek()

    def pop(self) -> WaitingRequest:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self.take(request)
        return request

    def take(self, request: WaitingRequest) -> None:
        user = self._user_of[request.handle]
        if not request.num_preemptions:  # what is computed again is not the user's doing
            cost = request.num_tokens * self._options.prompt_cost
            self._counters[user] += cost * self._per_token[user]
        self.remove(request.handle)

    def __len__(self) -> int:
        return len(self._user_of)

    def waiting(self) -> Iterable[WaitingRequest]:
        return [request for queue in self._queues.values() for request in queue.waiting()]

    def _least_user(self) -> int | None:
        heap = self._heap
        while heap:
            counter, user = heap[0]
            if user not in self._queues:
                heapq.heappop(heap)
                self._in_heap.discard(user)
            elif counter < self._counters[user]:
                heapq.heapreplace(heap, (float(self._counters[user]), user))
            else:
                return user
        return None

    def _leave(self, user: int) -> None:
        del self._queues[user]
        self._last_left = float(self._counters[user])

    def _number(self, user: str | None) -> int:
        number = self._numbers.get(user)
        if number is None:
            number = self._unused.pop() if self._unused else len(self._numbers)
            self._numbers[user] = number
            if number == len(self._counters):
                self._counters = np.concatenate([self._counters, np.zeros(number)])
                self._per_token = np.concatenate([self._per_token, np.ones(number)])
            options = self._options
            weight = options.default_weight
            if user is not None:
                weight = options.weights.get(user, weight)
            self._per_token[number] = 1.0 / weight
        return number

    # ---- service --------------------------------------------------------------------------------

    def on_step(self, view: RunningView, scheduled: NDArray[np.int64]) -> None:
        sampling = view.num_computed == view.num_tokens
        users = self._users(view)[sampling]
        if users.size:
            count = np.bincount(users, minlength=len(self._counters))
            self._counters += count * (self._options.output_cost * self._per_token)

    def _users(self, view: RunningView) -> NDArray[np.intp]:
        """Our number of each running request's user."""
        if view.user_names is not self._names:
            self._names, self._columns = view.user_names, np.empty(0, np.intp)
        known = len(self._columns)
        if known < len(view.user_names):
            new = [self._number(name) for name in view.user_names[known:]]
            self._columns = np.append(self._columns, np.asarray(new, np.intp))
        return self._columns[view.user]

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        """Those of the user who got most give way first, the latest arrival before the others."""
        by_key = np.lexsort((view.arrival, self._counters[self._users(view)]))
        keys = np.empty(len(by_key))
        keys[by_key] = np.arange(len(by_key))
        return keys

    def class_of(self, request: WaitingRequest) -> Hashable:
        return request.user

    def classes(self, view: RunningView) -> NDArray[np.int64] | None:
        return view.user
