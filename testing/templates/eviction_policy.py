"""Eviction policy `example`: what was retired first goes first, unless it was hit since."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.core.contracts import Options
from octavo.core.contracts.eviction_policy import EvictionPolicy, EvictionPolicyContext


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleEviction(EvictionPolicy):
    """An ordered set of blocks without a user."""

    def __init__(self, options: ExampleOptions, context: EvictionPolicyContext) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def retire(self, blocks: Sequence[int]) -> None:
        self._order.update(dict.fromkeys(blocks))

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._order.pop(block, None)

    def evict(self, count: int) -> list[int]:
        return [self._order.popitem(last=False)[0] for _ in range(count)]

    def __len__(self) -> int:
        return len(self._order)

    def blocks(self) -> Iterable[int]:
        return list(self._order)
