"""KV cache manager `radix`: prefixes in a tree over tokens, shared to the token.

A match may end inside a block: full blocks are shared, and the tokens of the last, partial one are
copied into a block of the new sequence's own. What a sequence computed becomes known block by block
while it runs, and to the last token when it leaves. Memory is taken from the ends of the branches
that were used least recently.

(Prefix reuse by radix tree: Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import (
    NO_MATCH,
    BlockCopy,
    CopyKind,
    KVCacheManagerContext,
    KVStats,
    Match,
)
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.kv_cache_managers.host_pool import SwappedSequence
from octavo.plugins.kv_cache_managers.radix_tree import PrefixMatch, RadixTree, Tip
from octavo.plugins.kv_cache_managers.tables import BlockTableManager


class RadixKVCacheManager(BlockTableManager):
    """`_computed[s]`: tokens of a slot whose KV is computed; `_known[s]`: those that are in
    the tree. `_nodes[b]`: nodes of the tree that refer to a block."""

    def __init__(self, options: NoOptions, context: KVCacheManagerContext) -> None:
        super().__init__(context)
        self.prefix_caching = context.prefix_caching
        slots = context.max_num_seqs
        self._computed = np.zeros(slots, np.int64)
        self._known = np.zeros(slots, np.int64)
        self._keys: list[bytes] = [b""] * slots
        self._tips: list[Tip | None] = [None] * slots
        self._tokens: NDArray[np.int32] = np.empty((slots, 0), np.int32)
        self._nodes = [0] * self.num_blocks
        self._tree = RadixTree(
            self.block_size, self._hold, self._unhold, lambda block: bool(self._refs[block])
        )
        self._count_evictable = 0
        self._queries = self._hits = 0

    # ---- lookup and admission -------------------------------------------------------------------

    def digest(self, token_ids: NDArray[np.int32], extra: Sequence[bytes]) -> bytes:
        return b"".join(len(key).to_bytes(4, "little") + key for key in extra)

    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        if not self.prefix_caching:
            return NO_MATCH
        found = self._tree.find(digest, token_ids, len(token_ids) - 1)
        return NO_MATCH if found is None else Match(found.num_tokens, found)

    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        found: PrefixMatch | None = match.handle
        full, partial = divmod(match.num_tokens, self.block_size)
        shared = found.blocks[:full] if found is not None else []
        needed = -(-total // self.block_size) - full
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if needed > self.num_available - revived:
            return None
        if found is not None:
            self._tree.touch(found.node)
            self._take_shared(shared)
        own = self._allocate_many(needed)
        if found is not None and partial:
            # It may just have been evicted: nothing writes into it before this copy.
            self._copy([(found.blocks[full], int(own[0]), partial)], CopyKind.DEVICE)
        self._fill_table(slot, shared, own)
        self._keys[slot] = digest
        self._computed[slot] = match.num_tokens
        if self.prefix_caching:
            self._queries += total
            self._hits += match.num_tokens
        return self.take_copies()

    # ---- publication and release ----------------------------------------------------------------

    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        if not self.prefix_caching:
            return
        self._tokens = tokens
        self._computed[slots] = totals
        full = totals - totals % self.block_size
        rows = np.flatnonzero(full > self._known[slots])
        for slot, count in zip(slots[rows].tolist(), full[rows].tolist(), strict=True):
            self._publish(slot, count)

    def _publish(self, slot: int, count: int) -> None:
        """Insert the slot's first `count` tokens into the tree."""
        blocks = self._table[slot, : -(-count // self.block_size)].tolist()
        self._tips[slot] = self._tree.insert(
            self._keys[slot], self._tokens[slot, :count], blocks, self._tips[slot]
        )
        self._known[slot] = count

    def truncate(self, slot: int, total: int) -> None:
        super().truncate(slot, total)
        self._computed[slot] = min(int(self._computed[slot]), total)
        if self._known[slot] > total:
            self._known[slot] = total
            self._tips[slot] = None  # it may go on differently

    def _is_known(self, slot: int, index: int) -> bool:
        return super()._is_known(slot, index) or self._nodes[self._table[slot, index]] > 0

    def release(self, slot: int) -> None:
        computed = int(self._computed[slot])
        if self.num_slot_blocks[slot] and computed > self._known[slot] and self.prefix_caching:
            self._publish(slot, computed)
        super().release(slot)

    def _forget_slot(self, slot: int) -> None:
        self._computed[slot] = self._known[slot] = 0
        self._tips[slot] = None

    # ---- forks and swapping ---------------------------------------------------------------------

    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        if self.num_available < 1:
            return None
        full, partial = divmod(total, self.block_size)
        shared = self._table[parent, :full].tolist()
        self._take_shared(shared)
        own = self._allocate_many(1)
        self._fill_table(child, shared, own)
        self._keys[child] = self._keys[parent]
        if self.prefix_caching:
            self._queries += total + 1
            self._hits += total
        if partial:
            source = int(self._table[parent, full])
            self._copy([(source, int(own[0]), partial)], CopyKind.DEVICE)
        return self.take_copies()

    def _swap_state(self, slot: int) -> tuple[bytes, NDArray[np.int32]]:
        return self._keys[slot], self._tokens[slot, : self._computed[slot]].copy()

    def _shared_on_return(self, swapped: SwappedSequence) -> list[int]:
        key, tokens = swapped.state
        found = self._tree.find(key, tokens, len(tokens))
        return found.blocks[: found.num_tokens // self.block_size] if found is not None else []

    def _swapped_in(self, slot: int, swapped: SwappedSequence, num_shared: int) -> None:
        self._keys[slot] = swapped.state[0]
        self._computed[slot] = swapped.num_tokens

    # ---- blocks ---------------------------------------------------------------------------------

    def _num_evictable(self) -> int:
        return self._count_evictable

    def _take_shared(self, blocks: list[int]) -> None:
        self._count_evictable -= sum(1 for block in blocks if self._refs[block] == 0)
        self._refs[blocks] += 1

    def _retire(self, blocks: list[int]) -> None:
        for block in blocks:
            if self._nodes[block]:
                self._count_evictable += 1
            else:
                self._free.give([block])

    def _evict(self, count: int) -> list[int]:
        while len(self._free) < count:
            self._tree.shrink()
        blocks: list[int] = self._free.take(count).tolist()
        return blocks

    def _hold(self, block: int) -> None:
        self._nodes[block] += 1

    def _unhold(self, block: int) -> None:
        self._nodes[block] -= 1
        if not self._nodes[block] and not self._refs[block]:
            self._count_evictable -= 1
            self._free.give([block])

    # ---- inspection -----------------------------------------------------------------------------

    def stats(self) -> KVStats:
        return KVStats(
            self.num_blocks - 1,
            len(self._free),
            self._count_evictable,
            self._queries,
            self._hits,
            self._swap.num_blocks,
            self._swap.num_free,
        )

    def reset_prefix_cache(self) -> bool:
        if self.num_available < self.num_blocks - 1:
            return False
        self._tree.clear()
        return True

    def _evictable(self) -> Iterable[int]:
        return [b for b, nodes in enumerate(self._nodes) if nodes and not self._refs[b]]

    def check(self) -> None:
        super().check()
        nodes = [0] * self.num_blocks
        size, every = self.block_size, self._tree.nodes()
        for node in every:
            assert len(node.tokens), "a node without tokens"
            wanted = -(-node.end // size) - node.start // size
            assert len(node.blocks) == wanted, "a node's blocks do not cover its tokens"
            assert node.parent is not None, "a node of the tree has no parent"
            assert node.parent.end == node.start, "a node does not continue its parent"
            for block in node.blocks:
                nodes[block] += 1
        assert nodes == self._nodes, "nodes that refer to blocks are miscounted"
        assert self._tree.num_nodes == len(every), "nodes are miscounted"
