"""Eviction policy `segmented_lru`: what was hit once is kept longer than what never was.

Blocks enter a probation segment; a prefix hit moves them, at their next retirement, into a protected
one, which holds at most a share of the pool and gives its oldest back to probation. A flood of
prompts that nobody repeats passes through probation and leaves shared prefixes alone (Karedla, Love
and Wherry, "Caching Strategies to Improve Disk System Performance", 1994).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.eviction_policy import EvictionPolicy, EvictionPolicyContext


class SegmentedLruOptions(Options):
    """How the pool is divided."""

    protected: float = Field(
        default=0.8, gt=0, lt=1, description="Share of the pool that may be protected."
    )


class SegmentedLruEviction(EvictionPolicy):
    """Two ordered sets of blocks without a user."""

    def __init__(self, options: SegmentedLruOptions, context: EvictionPolicyContext) -> None:
        self._most = max(1, int(options.protected * context.num_blocks))
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()
        self._hit: set[int] = set()

    def retire(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            segment = self._protected if block in self._hit else self._probation
            segment[block] = None
        while len(self._protected) > self._most:
            block, _ = self._protected.popitem(last=False)
            self._probation[block] = None

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._probation.pop(block, None)
            self._protected.pop(block, None)
        self._hit.update(blocks)

    def evict(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            segment = self._probation or self._protected
            block, _ = segment.popitem(last=False)
            self._hit.discard(block)
            taken.append(block)
        return taken

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def blocks(self) -> Iterable[int]:
        return [*self._probation, *self._protected]

    def link(self, block: int, parent: int) -> None:
        self._hit.discard(block)  # new content
