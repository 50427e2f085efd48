"""KV cache manager `none`: every sequence has blocks of its own. The baseline for comparisons.

Nothing is looked up and nothing is kept when a sequence ends. A fork copies the parent's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from octavo.plugins.kv_cache_managers.tables import BlockTableManager


class UnsharedKVCacheManager(BlockTableManager):
    """A block has one user or is free."""

    def __init__(self, options: NoOptions, context: KVCacheManagerContext) -> None:
        super().__init__(context)

    def digest(self, token_ids: NDArray[np.int32], extra: Sequence[bytes]) -> Any:
        return None

    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        return NO_MATCH

    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        needed = -(-total // self.block_size)
        if needed > self.num_available:
            return None
        self._fill_table(slot, (), self._allocate_many(needed))
        return ()

    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        pass

    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        blocks = self._table[parent, : -(-total // self.block_size)].tolist()
        if self.admit(child, None, NO_MATCH, total + 1) is None:
            return None
        targets = self._table[child, : len(blocks)].tolist()
        self._copy(self._whole(blocks, targets, total), CopyKind.DEVICE)
        return self.take_copies()

    def _evict(self, count: int) -> list[int]:
        raise AssertionError(f"{count} blocks more than there are were handed out")

    def _retire(self, blocks: list[int]) -> None:
        self._free.give(blocks)

    def _forget_slot(self, slot: int) -> None:
        pass

    def stats(self) -> KVStats:
        return KVStats(
            self.num_blocks - 1,
            len(self._free),
            0,
            0,
            0,
            num_swap_blocks=self._swap.num_blocks,
            num_free_swap_blocks=self._swap.num_free,
        )

    def reset_prefix_cache(self) -> bool:
        return True
