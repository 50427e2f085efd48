"""FlashInfer's page table (indptr, indices, last_page_len) from block tables, by array operations.

Legend: B rows, M blocks a row at most, P tokens a block, n pages of all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class PageTable:
    """indptr: int32[B + 1], where each row's pages begin. indices: int32[n], blocks of the rows,
    one row after another. last_page_len: int32[B], tokens in each row's last page (0 of a row
    without tokens)."""

    indptr: Int32
    indices: Int32
    last_page_len: Int32

    def rows(self, start: int, stop: int) -> PageTable:
        """Of the rows [start, stop)."""
        indptr = self.indptr[start : stop + 1]
        return PageTable(
            indptr - indptr[0],
            self.indices[indptr[0] : indptr[-1]],
            self.last_page_len[start:stop],
        )


def page_table(
    seq_lens: Int32, block_table: Int32, block_size: int, skipped: Int32 | None = None
) -> PageTable:
    """Pages of int32[B] lengths in int32[B, M] tables. skipped: int32[B], leading pages of each row
    that are left out (they are computed elsewhere)."""
    pages = -(-seq_lens // block_size)
    first = np.zeros_like(pages) if skipped is None else skipped
    indptr = np.zeros(len(pages) + 1, np.int32)
    np.cumsum(pages - first, out=indptr[1:])
    width = int(pages.max(initial=0))
    column = np.arange(width, dtype=np.int32)
    kept = (column < pages[:, None]) & (column >= first[:, None])
    last = np.where(seq_lens > 0, (seq_lens - 1) % block_size + 1, 0).astype(np.int32)
    return PageTable(indptr, block_table[:, :width][kept].astype(np.int32, copy=False), last)


def appended(query_start: Int32, seq_lens: Int32) -> tuple[Int32, Int32]:
    """(row, position) int32[T] of every token of a batch, from int32[B + 1] and int32[B]."""
    counts = np.diff(query_start)
    rows = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    computed = seq_lens - counts - query_start[:-1]
    positions = np.arange(int(query_start[-1]), dtype=np.int32) + np.repeat(computed, counts)
    return rows, positions.astype(np.int32, copy=False)


@dataclass(frozen=True)
class SharedPrefix:
    """rows: intp, those that share it, ascending. others: the other rows. pages: int32, its
    blocks."""

    rows: NDArray[np.intp]
    others: NDArray[np.intp]
    pages: Int32


def shared_prefix(
    seq_lens: Int32, block_table: Int32, block_size: int, *, min_rows: int, min_pages: int
) -> SharedPrefix | None:
    """The longest run of leading blocks that the most numerous group of rows has in common (rows
    with the same block at the last of `min_pages` places), without the last block of any of them;
    None when there are fewer rows or pages than asked for. Rows that are shorter, or that begin
    alike and part earlier, belong to no group."""
    # A row's last page is its own: its new token is written there.
    long = np.flatnonzero((seq_lens - 1) // block_size >= min_pages)
    if len(long) < min_rows:
        return None
    _, inverse, counts = np.unique(
        block_table[long, min_pages - 1], return_inverse=True, return_counts=True
    )
    rows = long[inverse == int(counts.argmax())]
    if len(rows) < min_rows:
        return None
    limit = int((seq_lens[rows].min() - 1) // block_size)
    tables = block_table[rows, :limit]
    same = (tables == tables[0]).all(axis=0)
    length = limit if same.all() else int(same.argmin())
    if length < min_pages:
        return None
    others = np.setdiff1d(np.arange(len(seq_lens)), rows, assume_unique=True)
    return SharedPrefix(rows, others, tables[0, :length].astype(np.int32))
