"""KV cache manager `example`: every sequence has blocks of its own, nothing is shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts import Options
from octavo.core.contracts.kv_cache_manager import (
    NO_MATCH,
    BlockCopy,
    KVCacheManager,
    KVCacheManagerContext,
    KVStats,
    Match,
)


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleManager(KVCacheManager):
    """A block has one user or is free. The same block number is used in every group."""

    def __init__(self, options: ExampleOptions, context: KVCacheManagerContext) -> None:
        self._size, self._groups = context.block_size, context.num_groups
        self._num_blocks = context.num_blocks - 1  # block 0 is the null block
        self._free = list(range(context.num_blocks - 1, 0, -1))
        width = -(-context.max_model_len // context.block_size)
        shape = (context.num_groups, context.max_num_seqs, width)
        self.block_tables = np.zeros(shape, np.int32)
        self.num_slot_blocks = np.zeros(context.max_num_seqs, np.int32)

    # ---- prefixes: none are kept ------------------------------------------------------------

    def digest(self, token_ids: NDArray[np.int32], extra: Sequence[bytes]) -> Any:
        return None

    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        return NO_MATCH

    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        """Nothing is published."""

    def reset_prefix_cache(self) -> bool:
        return True

    # ---- blocks -----------------------------------------------------------------------------

    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        return () if self._grow(slot, total) else None

    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        needed = -(-totals // self._size)
        for index in np.flatnonzero(needed > self.num_slot_blocks[slots]).tolist():
            if not self._grow(int(slots[index]), int(totals[index])):
                return int(index)
        return len(slots)

    def _grow(self, slot: int, total: int) -> bool:
        """Give a slot blocks for `total` tokens, or nothing."""
        held = int(self.num_slot_blocks[slot])
        needed = -(-total // self._size)
        if needed - held > len(self._free):
            return False
        for index in range(held, needed):
            self.block_tables[:, slot, index] = self._free.pop()
        self.num_slot_blocks[slot] = max(held, needed)
        return True

    def _shrink(self, slot: int, keep: int) -> None:
        held = int(self.num_slot_blocks[slot])
        self._free += self.block_tables[0, slot, keep:held].tolist()
        self.block_tables[:, slot, keep:held] = 0
        self.num_slot_blocks[slot] = keep

    def truncate(self, slot: int, total: int) -> None:
        self._shrink(slot, min(int(self.num_slot_blocks[slot]), -(-total // self._size)))

    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        if not self._grow(child, total + 1):
            return None
        return [
            BlockCopy(
                group,
                int(self.block_tables[group, parent, index]),
                int(self.block_tables[group, child, index]),
                min(self._size, total - index * self._size),
            )
            for group in range(self._groups)
            for index in range(-(-total // self._size))
        ]

    def release(self, slot: int) -> None:
        self._shrink(slot, 0)

    # ---- counts -----------------------------------------------------------------------------

    def fits(self, total: int) -> int | None:
        most = self._num_blocks * self._size
        return None if total <= most else most

    def stats(self) -> KVStats:
        return KVStats(self._num_blocks, len(self._free), 0, 0, 0)

    def check(self) -> None:
        used = self.block_tables[0][self.block_tables[0] > 0].tolist()
        assert len(set(used)) == len(used), "a block has two users"
        assert sorted(used + self._free) == list(range(1, self._num_blocks + 1)), "blocks are lost"
