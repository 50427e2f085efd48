"""Eviction policy `prefix_aware`: keep the blocks that many chains go through.

A chain is a path of blocks, each continuing the one before. A block's key is the number of chains
that went through it since its content was made, plus the key of the block that was evicted last
when it was last used (ageing, as in `lfu`): a system prompt that a hundred conversations begin with
has a hundred, the tail of each has one, and one prompt that is repeated a hundred times has one.
The smallest key goes first; equal keys go by time of retirement.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.eviction.keyed import KeyedPolicy


class PrefixAwarePolicy(KeyedPolicy):
    """`_parent[b]`: the block that b continues (0: none) and which of its contents, counted by
    `_content`."""

    def __init__(self, options: NoOptions, context: EvictionPolicyContext) -> None:
        super().__init__(context.num_blocks)
        self._parent = [(0, 0)] * context.num_blocks
        self._content = [0] * context.num_blocks
        self._continued = bytearray(context.num_blocks)
        self._chains = [1] * context.num_blocks
        self._age = 0

    def chains(self, block: int) -> int:
        """How many chains went through a block that has content."""
        return self._chains[block]

    def link(self, block: int, parent: int) -> None:
        self._parent[block] = parent, self._content[parent]
        # The first continuation makes a chain longer, every further one makes a new chain.
        if parent and self._continued[parent]:
            self._add_chain(parent)
        self._continued[parent] = True

    def _add_chain(self, block: int) -> None:
        while block:
            self._chains[block] += 1
            entry = self._entry[block]
            if entry is not None:
                self._push((entry[0] + 1, entry[1], block))
            parent, content = self._parent[block]
            block = parent if self._content[parent] == content else 0

    def retire(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._insert(block, self._age + self._chains[block])

    def reuse(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._remove(block)

    def _forget(self, block: int, key: int) -> None:
        self._age = max(self._age, key - 1)  # a block's own chain is no merit
        self._content[block] += 1
        self._continued[block] = False
        self._chains[block] = 1
