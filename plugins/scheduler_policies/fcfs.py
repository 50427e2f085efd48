"""Scheduler policy `fcfs`: first come, first served; the latest arrival gives way first."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from octavo.core.contracts.provider import NoOptions
from octavo.core.contracts.scheduler_policy import (
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)


class FcfsPolicy(SchedulerPolicy):
    """A heap by arrival, so that a preempted request returns to the place that it had. Removal is
    lazy: an entry counts only while `_live` has its request."""

    def __init__(self, options: NoOptions, context: SchedulerPolicyContext) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, WaitingRequest] = {}

    def add(self, request: WaitingRequest) -> None:
        self._live[request.handle] = request
        heapq.heappush(self._heap, (request.arrival, request.handle))

    def remove(self, handle: int) -> bool:
        return self._live.pop(handle, None) is not None

    def peek(self) -> WaitingRequest | None:
        while self._heap:
            arrival, handle = self._heap[0]
            request = self._live.get(handle)
            if request is not None and request.arrival == arrival:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> WaitingRequest:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        return self._live.pop(request.handle)

    def __len__(self) -> int:
        return len(self._live)

    def waiting(self) -> Iterable[WaitingRequest]:
        return self._live.values()
