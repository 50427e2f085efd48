"""Blocks for the decoding rows: who needs one, and what the worker has not been told of.

Every decoding row gets one token a step, so a row that is at a block border now is there again
`block_size` steps later. While the same rows decode, a step looks at one row in `block_size`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.engine.scheduler.state import RowSet, SlotTable

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler

_NO_BLOCKS = np.empty((4, 0), np.int32)


class Growth:
    """The part of the scheduler that keeps block tables as long as the sequences. `_told[s]`:
    blocks of a slot that the worker knows of. `_grown`: slots that got blocks since the last plan.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        self._borders = Borders(scheduler.limits.block_size)
        self._told = np.zeros(scheduler.limits.max_num_seqs, np.int32)
        self._grown: list[NDArray[np.intp]] = []
        self._causes_copies = type(scheduler.kv).take_copies is not KVCacheManager.take_copies

    def make_room(self) -> bool:
        """Give every decoding row a block for its next token, preempting where blocks are short.
        False when that must wait for a step in flight."""
        scheduler = self._s
        kv, table = scheduler.kv, scheduler.slots
        while len(scheduler.decoding):
            due = self._borders.due(scheduler.decoding, scheduler.num_steps, table, kv)
            if not len(due):
                return True
            fitting = kv.extend(due, table.num_tokens[due])
            if self._causes_copies:
                scheduler.copies.extend(kv.take_copies())
            if fitting:
                self._grown.append(due[:fitting])
            if fitting == len(due):
                return True
            if scheduler.in_flight:
                return False
            assert scheduler.num_running > 1, "one sequence alone cannot be short of blocks"
            lacks = int(table.handle[due[fitting]])
            scheduler.preemption.preempt(scheduler.preemption.choose_victim(), lacks, "blocks")
        return True

    def seated(self, slot: int) -> None:
        """The plan tells the worker of the blocks that this slot was admitted with."""
        self._told[slot] = self._s.kv.num_slot_blocks[slot]

    def left(self, slot: int) -> None:
        """The slot has no blocks any more."""
        self._told[slot] = 0

    def take_appended(self) -> NDArray[np.int32]:
        """Blocks that the worker has not been told of, int32[4, n] as in a plan."""
        if not self._grown:
            return _NO_BLOCKS
        slots = self._grown[0] if len(self._grown) == 1 else np.unique(np.concatenate(self._grown))
        self._grown = []
        kv = self._s.kv
        held, first = kv.num_slot_blocks[slots], self._told[slots]
        counts = held - first
        if not counts.all():  # of a sequence that has left, or nothing was needed
            rows = counts.nonzero()[0]
            if not len(rows):
                return _NO_BLOCKS
            slots, first, held, counts = slots[rows], first[rows], held[rows], counts[rows]
        self._told[slots] = held
        indices = first
        if int(counts.max()) > 1:
            row = np.repeat(np.arange(len(slots)), counts)
            indices = first[row] + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
            slots = slots[row]
        tables = kv.block_tables
        appended = np.empty((4, len(tables), len(slots)), np.int32)
        for group, blocks in enumerate(tables):
            appended[0, group] = group
            appended[3, group] = blocks[slots, indices]
        appended[1], appended[2] = slots, indices
        return appended.reshape(4, -1)


class Borders:
    """Buckets of slots by the step, modulo the block size, in which they need a block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._version = -1
        self._first_step = 0
        self._buckets: list[NDArray[np.intp]] = []

    def due(
        self, rows: RowSet, step: int, table: SlotTable, kv: KVCacheManager
    ) -> NDArray[np.intp]:
        """Slots among `rows` that may need a block for their next token, in the order of the rows.
        `step` counts the plans made so far."""
        if rows.version != self._version:
            self._version, self._buckets = rows.version, []
            room = kv.num_slot_blocks[rows.index] * self._block_size
            return rows.slots[room < table.num_tokens[rows.index]]
        if not self._buckets:
            self._fill(rows, step, table, kv)
        return self._buckets[(step - self._first_step) % self._block_size]

    def _fill(self, rows: RowSet, step: int, table: SlotTable, kv: KVCacheManager) -> None:
        size = self._block_size
        room = kv.num_slot_blocks[rows.index] * size - table.num_tokens[rows.index]
        bucket = (room + 1) % size  # a row without room for one token more is due now
        by_bucket = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[by_bucket], np.arange(1, size))
        self._buckets = np.split(rows.slots[by_bucket], ends)
        self._first_step = step
