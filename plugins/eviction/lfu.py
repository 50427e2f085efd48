"""Eviction policy `lfu`: the block with the fewest prefix hits goes first, with ageing.

A block's key is its number of hits since its content was made, plus the key of the block that was
evicted last when it was last used: so what was popular long ago goes in the end. (Dynamic ageing:
Arlitt et al., "Evaluating Content Management Techniques for Web Proxy Caches", 2000.) Equal keys
go by time of retirement.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.eviction.keyed import KeyedPolicy


class LfuPolicy(KeyedPolicy):
    """Hits are kept while a block has content."""

    def __init__(self, options: NoOptions, context: EvictionPolicyContext) -> None:
        super().__init__(context.num_blocks)
        self._hits = [0] * context.num_blocks
        self._age = 0

    def retire(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._insert(block, self._age + self._hits[block])

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._hits[block] += 1
            self._remove(block)

    def _forget(self, block: int, key: int) -> None:
        self._age = max(self._age, key)
        self._hits[block] = 0
