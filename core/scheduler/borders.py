"""Which decoding rows need a block: found once, and kept while the same rows decode.

Every decoding row gets one token a step, so a row that is at a block border now is there again
`block_size` steps later. A step then looks at one row in `block_size`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.core.scheduler.state import RowSet, SlotTable


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
        """Slots among `rows` that may need a block for their next token, in the order of the rows:
        all of them when the rows have just changed. `step` counts the plans made so far."""
        if rows.version != self._version:
            self._version, self._buckets = rows.version, []
            return rows.slots
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
