"""A heap of evictable blocks by key, with lazy deletion."""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterable

from octavo.core.contracts.eviction_policy import EvictionPolicy


class KeyedPolicy(EvictionPolicy):
    """The smallest key goes first, of equal ones the block that was retired first. An entry of the
    heap counts only while it is its block's latest."""

    def __init__(self, num_blocks: int) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._entry: list[tuple[int, int, int] | None] = [None] * num_blocks
        self._stamp = 0
        self._count = 0

    def _insert(self, block: int, key: int) -> None:
        self._stamp += 1
        self._count += 1
        self._push((key, self._stamp, block))
        if len(self._heap) > 2 * self._count + 1024:
            self._heap = [entry for entry in self._entry if entry is not None]
            heapq.heapify(self._heap)

    def _push(self, entry: tuple[int, int, int]) -> None:
        self._entry[entry[2]] = entry
        heapq.heappush(self._heap, entry)

    def _remove(self, block: int) -> None:
        if self._entry[block] is not None:
            self._entry[block] = None
            self._count -= 1

    def evict(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            entry = heapq.heappop(self._heap)
            key, _, block = entry
            if self._entry[block] is entry:
                self._remove(block)
                taken.append(block)
                self._forget(block, key)
        return taken

    @abstractmethod
    def _forget(self, block: int, key: int) -> None:
        """The content of a block was evicted at `key`."""

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> Iterable[int]:
        return [block for block, entry in enumerate(self._entry) if entry is not None]
