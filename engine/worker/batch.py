"""From a plan and the mirror to the flat tensors of a forward pass.

Legend: B rows, T tokens (flat, all rows one after another), G KV groups, M blocks a row at most,
P tokens a block. All work is done by a fixed number of vector operations; what depends on
`StepPlan.layout` alone is kept from step to step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.attention_backend import AttentionBatch
from octavo.core.messages import StepPlan
from octavo.engine.worker.mirror import Mirror
from octavo.kernels import PinnedTwin

_NARROW = 4
"""Tables of which one column in so many or fewer is in use are copied as far as that goes: an entry
of a part of a row takes several times as long as one of whole rows."""


class _Tokens:
    """Columns with an entry a token. slot_mapping: one a KV group."""

    def __init__(self, size: int, num_groups: int, device: torch.device) -> None:
        self.size = size
        self.token_ids = PinnedTwin((size,), torch.int64, device)
        self.positions = PinnedTwin((size,), torch.int64, device)
        self.slot_mapping = [PinnedTwin((size,), torch.int64, device) for _ in range(num_groups)]

    @property
    def columns(self) -> list[PinnedTwin]:
        return [self.token_ids, self.positions, *self.slot_mapping]


@dataclass(slots=True)
class StepBatch:
    """One step's inputs, padding rows (of a decode-only batch) included in all but slots and last.
    slots: intp[B]. token_ids, positions: int64[T] on the device. groups: the
    attention metadata of each KV group. last: int64[B] on the host, each row's last flat index."""

    slots: NDArray[np.intp]
    num_decodes: int
    num_tokens: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: list[AttentionBatch]
    last: NDArray[np.int64]


class BatchBuilder:
    """Writes batches into buffers made once. `max_tokens` is a first guess: the buffers of batches
    with prompts grow when a plan asks for more; those of decode-only batches, which captured graphs
    read, stay where they are. pad: see `GraphRunner.padded_rows`; None: batches are as large as
    they are."""

    def __init__(self, mirror: Mirror, *, max_tokens: int, device: torch.device) -> None:
        self._mirror, self._device = mirror, device
        rows, groups = mirror.num_slots, mirror.num_groups
        self._arange = np.arange(rows + 1, dtype=np.int64)
        self._query_start = PinnedTwin((rows + 1,), torch.int32, device)
        self._decode_start = PinnedTwin((rows + 1,), torch.int32, device)
        self._decode_start.array[:] = self._arange
        self._decode_start.push(rows + 1)
        self._seq_lens = PinnedTwin((rows,), torch.int32, device)
        max_blocks = mirror.block_tables.shape[2]
        self._tables = [PinnedTwin((rows, max_blocks), torch.int32, device) for _ in range(groups)]
        self._width = 0  # columns of the tables that may hold something else than 0
        self._shared_tables = [torch.from_numpy(table) for table in mirror.block_tables]
        self._row_scratch = np.zeros((3, rows), dtype=np.int64)
        self._decodes = _Tokens(rows, groups, device)
        self._flat = _Tokens(max(max_tokens, rows), groups, device)
        self._layout: int | None = None
        self._slots = np.zeros(0, dtype=np.intp)
        self._dense = False
        self._decode_batch: StepBatch | None = None
        self.pad: Callable[[int], int] | None = None
        self._borders: list[NDArray[np.intp]] = []
        self._age = 0  # decode steps since the borders were found
        self._advances = 0  # of the mirror, when `_decode_batch` was filled
        self._twins = device.type != "cpu"

    def build(self, plan: StepPlan) -> StepBatch:
        """The batch of a plan that the mirror has already applied. The copies that the last call
        launched must have run: they read the buffers that are written here."""
        new_layout = plan.layout != self._layout
        if new_layout:
            self._layout = plan.layout
            self._slots = plan.slots.astype(np.intp)
            self._dense = bool((self._slots == self._arange[: self._slots.size]).all())
            self._decode_batch = None
        if plan.num_decodes == self._slots.size:
            return self._build_decodes(plan)
        return self._build_mixed(plan)

    # ---- one token a row ------------------------------------------------------------------------

    def _build_decodes(self, plan: StepPlan) -> StepBatch:
        mirror, slots, rows = self._mirror, self._slots, self._slots.size
        batch = self._decode_batch
        if batch is None or plan.admitted or mirror.num_advances != self._advances + 1:
            batch = self._decode_batch = self._begin_decodes(slots, rows)
            self._fill_tables(rows, batch.num_decodes, changed=True)
        else:
            self._advance_decodes(batch, rows)
            self._fill_tables(rows, batch.num_decodes, changed=bool(plan.appended.size))
        self._advances = mirror.num_advances
        last = mirror.last_token
        self._decodes.token_ids.array[:rows] = last[:rows] if self._dense else last.take(slots)
        self._push(self._decodes, batch.num_tokens, batch.num_decodes)
        return batch

    def _begin_decodes(self, slots: NDArray[np.intp], rows: int) -> StepBatch:
        mirror = self._mirror
        self._borders = []
        positions = self._decodes.positions.array[:rows]
        if self._dense:
            positions[:] = mirror.num_computed[:rows]
        else:
            np.take(mirror.num_computed, slots, out=positions, mode="clip")
        index, block, offset = self._row_scratch[:, :rows]
        np.add(positions, 1, out=self._seq_lens.array[:rows], casting="unsafe")
        np.floor_divide(positions, mirror.block_size, out=block)
        np.multiply(block, mirror.block_size, out=offset)
        np.subtract(positions, offset, out=offset)
        np.multiply(slots, mirror.block_tables.shape[2], out=index)
        np.add(index, block, out=index)
        for group in range(mirror.num_groups):
            mapping = self._decodes.slot_mapping[group].array[:rows]
            mapping[:] = mirror.block_tables[group].reshape(-1).take(index)
            mapping *= mirror.block_size
            mapping += offset
        padded = rows if self.pad is None else self.pad(rows)
        self._write_padding(rows, padded)
        return self._batch(self._decodes, padded, padded, self._decode_start, 1, padded)

    def _write_padding(self, rows: int, padded: int) -> None:
        """Rows of one token at position 0 of the null block."""
        for column in (*self._decodes.columns, *self._tables):
            column.array[rows:padded] = 0
        self._seq_lens.array[rows:padded] = 1

    def _advance_decodes(self, batch: StepBatch, rows: int) -> None:
        """As before, one token on. Only rows at a block border, one in `block_size`, look at their
        block table."""
        mirror, size = self._mirror, self._mirror.block_size
        positions = self._decodes.positions.array[:rows]
        positions += 1
        if not self._borders:
            self._find_borders(positions)
        self._seq_lens.array[:rows] += 1
        border = self._borders[self._age % size]
        self._age += 1
        for group in range(mirror.num_groups):
            mapping = self._decodes.slot_mapping[group].array[:rows]
            mapping += 1
            if border.size:
                blocks = positions[border] // size
                mapping[border] = mirror.block_tables[group][self._slots[border], blocks] * size
        for group_batch in batch.groups:
            group_batch.max_seq_len += 1

    def _find_borders(self, positions: NDArray[np.int64]) -> None:
        """Rows by the step, modulo the block size, in which their token begins a block."""
        size = self._mirror.block_size
        bucket = -positions % size
        rows = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[rows], np.arange(1, size))
        self._borders, self._age = np.split(rows, ends), 0

    # ---- prefill rows behind the decodes --------------------------------------------------------

    def _build_mixed(self, plan: StepPlan) -> StepBatch:
        mirror, slots, rows = self._mirror, self._slots, self._slots.size
        starts = self._query_start.array
        np.cumsum(plan.counts, out=starts[1 : rows + 1])
        num_tokens = int(starts[rows])
        tokens = self._tokens(num_tokens)
        counts = plan.counts
        computed = mirror.num_computed[slots]
        positions = tokens.positions.array[:num_tokens]
        np.add(
            np.repeat(computed - starts[:rows], counts),
            np.arange(num_tokens),
            out=positions,
        )
        token_slots = np.repeat(slots, counts)
        tokens.token_ids.array[:num_tokens] = mirror.flat_token_ids.take(
            token_slots * mirror.token_stride + positions
        )
        np.add(computed, counts, out=self._seq_lens.array[:rows], casting="unsafe")
        block, offset = np.divmod(positions, mirror.block_size)
        index = token_slots * mirror.block_tables.shape[2] + block
        for group in range(mirror.num_groups):
            mapping = tokens.slot_mapping[group].array[:num_tokens]
            mapping[:] = mirror.block_tables[group].reshape(-1).take(index)
            mapping *= mirror.block_size
            mapping += offset
        self._fill_tables(rows, rows, changed=True)
        self._query_start.push(rows + 1)
        self._push(tokens, num_tokens, rows)
        # Decodes that follow in the same layout (it can recur) must not find these views stale.
        self._decode_batch = None
        longest = int(counts.max())
        return self._batch(tokens, num_tokens, plan.num_decodes, self._query_start, longest, rows)

    def _tokens(self, num_tokens: int) -> _Tokens:
        """The buffers for a batch with prompts."""
        if num_tokens > self._flat.size:
            self._flat = _Tokens(num_tokens, self._mirror.num_groups, self._device)
        return self._flat

    # ---- nothing but padding --------------------------------------------------------------------

    def dummy(self, rows: int, tokens_each: int) -> StepBatch:
        """A batch of `rows` rows with so many tokens and nothing before them, for warm-ups and
        captures. It reads and writes the null block alone, and lies where other batches do."""
        self._layout, self._decode_batch = None, None
        self._slots, self._dense = np.arange(rows, dtype=np.intp), False
        total = rows * tokens_each
        decode = tokens_each == 1
        tokens = self._decodes if decode else self._tokens(total)
        start = self._decode_start if decode else self._query_start
        for column in (*tokens.columns, *self._tables):
            column.array[:total] = 0
        tokens.positions.array[:total] = np.tile(np.arange(tokens_each), rows)
        self._seq_lens.array[:rows] = tokens_each
        start.array[: rows + 1] = np.arange(rows + 1) * tokens_each
        start.push(rows + 1)
        for column in self._tables:
            column.push(rows)
        self._push(tokens, total, rows)
        return self._batch(tokens, total, rows if decode else 0, start, tokens_each, rows)

    # ---- shared ---------------------------------------------------------------------------------

    def _shared(self, padded: int) -> bool:
        """Whether the mirror's own rows of the block tables are handed out: not where a captured
        graph reads the batch at its fixed address."""
        dense = self._dense and padded == self._slots.size
        return dense and not self._twins and self.pad is None

    def _fill_tables(self, rows: int, padded: int, changed: bool) -> None:
        if self._shared(padded):
            return
        if not changed:
            return
        width, largest = self._mirror.num_columns, self._mirror.block_tables.shape[2]
        if width < self._width:
            for column in self._tables:
                column.array[:, width : self._width] = 0
        narrow = width * _NARROW <= largest
        for table, column in zip(self._mirror.block_tables, self._tables, strict=True):
            if narrow:
                column.array[:rows, :width] = table[:, :width][self._slots]
            else:
                np.take(table, self._slots, axis=0, out=column.array[:rows], mode="clip")
            column.push(padded)
        self._width = width

    def _push(self, tokens: _Tokens, num_tokens: int, rows: int) -> None:
        if not self._twins:
            return  # the device reads what was written
        for column in tokens.columns:
            column.push(num_tokens)
        self._seq_lens.push(rows)

    def _batch(  # noqa: PLR0917
        self,
        tokens: _Tokens,
        num_tokens: int,
        num_decodes: int,
        query_start: PinnedTwin,
        max_query_len: int,
        rows: int,
    ) -> StepBatch:
        """Views of the buffers for a batch of this size, padding included."""
        seq_lens_cpu = self._seq_lens.array[:rows]
        shared = self._shared(rows)
        positions = tokens.positions.tensor[:num_tokens]
        groups = [
            AttentionBatch(
                num_tokens=num_tokens,
                num_rows=rows,
                num_decodes=num_decodes,
                max_query_len=max_query_len,
                max_seq_len=int(seq_lens_cpu.max()),
                query_start_loc=query_start.tensor[: rows + 1],
                seq_lens=self._seq_lens.tensor[:rows],
                block_table=(self._shared_tables[group] if shared else column.tensor)[:rows],
                slot_mapping=tokens.slot_mapping[group].tensor[:num_tokens],
                positions=positions,
                query_start_loc_cpu=query_start.array[: rows + 1],
                seq_lens_cpu=seq_lens_cpu,
                block_table_cpu=(self._mirror.block_tables[group] if shared else column.array)[
                    :rows
                ],
            )
            for group, column in enumerate(self._tables)
        ]
        return StepBatch(
            slots=self._slots,
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            token_ids=tokens.token_ids.tensor[:num_tokens],
            positions=positions,
            groups=groups,
            last=query_start.array[1 : self._slots.size + 1].astype(np.int64) - 1,
        )
