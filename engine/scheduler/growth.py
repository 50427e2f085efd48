"""Blocks for the decoding rows: who needs one, and which the worker has not been sent.

Every decoding row gets one token a step, so a row that is at a block border now is there again
`block_size` steps later. While the same rows decode, a step looks at one row in `block_size`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.engine.scheduler.kv_cache import KVCache
from octavo.engine.scheduler.state import RowSet, SlotTable

_NO_BLOCKS = np.empty((4, 0), np.int32)


class Growth:
    """Keeps block tables as long as the sequences."""

    def __init__(self, slots: SlotTable, cache: KVCache, block_size: int) -> None:
        self._slots, self._cache = slots, cache
        self._borders = BlockBorders(slots, cache.manager, block_size)
        self._grown: list[NDArray[np.intp]] = []

    def extend(self, step: int) -> int | None:
        """Give every decoding row a block for its next token. Return the first slot for which there
        is none, or None when all have one. step: number of plans so far."""
        rows = self._slots.decoding
        if not len(rows):
            return None
        due = self._borders.due(rows, step)
        if not len(due):
            return None
        fitting = self._cache.extend(due, self._slots.num_tokens[due])
        if fitting:
            self._grown.append(due[:fitting])
        return None if fitting == len(due) else int(due[fitting])

    def take_appended(self) -> NDArray[np.int32]:
        """Blocks that the worker has not been sent, int32[4, n] as in a plan."""
        if not self._grown:
            return _NO_BLOCKS
        slots = self._grown[0] if len(self._grown) == 1 else np.unique(np.concatenate(self._grown))
        self._grown = []
        manager = self._cache.manager
        held, first = manager.num_slot_blocks[slots], self._slots.num_sent_blocks[slots]
        counts = held - first
        if not counts.all():  # of a sequence that has left, or nothing was needed
            rows = counts.nonzero()[0]
            if not len(rows):
                return _NO_BLOCKS
            slots, first, held, counts = slots[rows], first[rows], held[rows], counts[rows]
        self._slots.count_sent_blocks(slots, held)
        indices = first
        if int(counts.max()) > 1:
            row = np.repeat(np.arange(len(slots)), counts)
            indices = first[row] + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
            slots = slots[row]
        tables = manager.block_tables
        appended = np.empty((4, len(tables), len(slots)), np.int32)
        for group, blocks in enumerate(tables):
            appended[0, group] = group
            appended[3, group] = blocks[slots, indices]
        appended[1], appended[2] = slots, indices
        return appended.reshape(4, -1)


class BlockBorders:
    """Buckets of slots by the step, modulo the block size, in which they need a block."""

    def __init__(self, slots: SlotTable, manager: KVCacheManager, block_size: int) -> None:
        self._slots, self._manager, self._block_size = slots, manager, block_size
        self._version = -1
        self._first_step = 0
        self._buckets: list[NDArray[np.intp]] = []

    def due(self, rows: RowSet, step: int) -> NDArray[np.intp]:
        """Slots among `rows` that may need a block for their next token, in the order of the rows.
        step: number of plans so far."""
        if rows.version != self._version:
            self._version, self._buckets = rows.version, []
            room = self._manager.num_slot_blocks[rows.index] * self._block_size
            return rows.slots[room < self._slots.num_tokens[rows.index]]
        if not self._buckets:
            self._fill(rows, step)
        return self._buckets[(step - self._first_step) % self._block_size]

    def _fill(self, rows: RowSet, step: int) -> None:
        size = self._block_size
        room = self._manager.num_slot_blocks[rows.index] * size - self._slots.num_tokens[rows.index]
        bucket = (room + 1) % size  # a row without room for one token more is due now
        by_bucket = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[by_bucket], np.arange(1, size))
        self._buckets = np.split(rows.slots[by_bucket], ends)
        self._first_step = step
