"""Eviction policy `lru`: the block that has been without a user for longest goes first."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from octavo.core.contracts.eviction_policy import EvictionPolicy, EvictionPolicyContext
from octavo.core.contracts.provider import NoOptions


class LruPolicy(EvictionPolicy):
    """A doubly linked list in two arrays, 8 bytes a block. Block 0, which is never handed out, is
    the list's end; a block whose `_next` is -1 is not on it."""

    def __init__(self, options: NoOptions, context: EvictionPolicyContext) -> None:
        self._next = array("i", [-1]) * context.num_blocks
        self._previous = array("i", [-1]) * context.num_blocks
        self._next[0] = self._previous[0] = 0
        self._count = 0

    def retire(self, blocks: Sequence[int]) -> None:
        after, before = self._next, self._previous
        last = before[0]
        for block in blocks:
            after[last] = block
            before[block] = last
            last = block
        after[last] = 0
        before[0] = last
        self._count += len(blocks)

    def reuse(self, blocks: Sequence[int]) -> None:
        after, before = self._next, self._previous
        for block in blocks:
            following = after[block]
            if following >= 0:
                preceding = before[block]
                after[preceding] = following
                before[following] = preceding
                after[block] = -1
                self._count -= 1

    def evict(self, count: int) -> list[int]:
        after = self._next
        first, taken = after[0], []
        for _ in range(count):
            taken.append(first)
            following = after[first]
            after[first] = -1
            first = following
        after[0] = first
        self._previous[first] = 0
        self._count -= count
        return taken

    def __len__(self) -> int:
        return self._count

    def blocks(self) -> Iterable[int]:
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]
