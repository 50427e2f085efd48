"""A waiting queue ordered by a key that does not change while a request waits."""

from __future__ import annotations

import heapq
import itertools
from abc import abstractmethod
from collections.abc import Iterable

from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest

_SLACK = 64
"""Dead entries a heap may hold beside as many as are live."""


class WaitingQueue:
    """A heap, smallest key first, then by handle. Removal is lazy: an entry counts only while
    `_live` points to it; the heap is rebuilt when most of it is dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, WaitingRequest]] = []
        self._live: dict[int, tuple[float, int, int, WaitingRequest]] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def add(self, key: float, request: WaitingRequest) -> None:
        """Queue a request that is not here."""
        entry = (key, request.handle, next(self._count), request)
        self._live[request.handle] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, handle: int) -> WaitingRequest | None:
        """Take a request out wherever it stands; None when it is not here."""
        entry = self._live.pop(handle, None)
        if entry is None:
            return None
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
        return entry[3]

    def peek(self) -> WaitingRequest | None:
        """The request with the smallest key."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry[1]) is entry:
                return entry[3]
            heapq.heappop(heap)
        return None

    def pop(self) -> WaitingRequest:
        """Take out what `peek` returns."""
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        heapq.heappop(self._heap)
        del self._live[request.handle]
        return request

    def waiting(self) -> Iterable[WaitingRequest]:
        """All of them, in order of arrival here."""
        return [entry[3] for entry in self._live.values()]


class QueuePolicy(SchedulerPolicy):
    """Base of policies whose waiting order is one key a request."""

    def __init__(self) -> None:
        self._queue = WaitingQueue()

    @abstractmethod
    def key(self, request: WaitingRequest) -> float:
        """The smallest goes first."""

    def add(self, request: WaitingRequest) -> None:
        self._queue.add(self.key(request), request)

    def remove(self, handle: int) -> bool:
        return self._queue.remove(handle) is not None

    def peek(self) -> WaitingRequest | None:
        return self._queue.peek()

    def pop(self) -> WaitingRequest:
        return self._queue.pop()

    def __len__(self) -> int:
        return len(self._queue)

    def waiting(self) -> Iterable[WaitingRequest]:
        return self._queue.waiting()
