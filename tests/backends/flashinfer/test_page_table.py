"""FlashInfer's page table against loops."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.backends.flashinfer.page_table import appended, page_table, shared_prefix

lengths = st.lists(st.integers(0, 60), min_size=1, max_size=8)


def tables(seq_lens, block_size, seed):
    width = max(-(-length // block_size) for length in seq_lens) + 2
    random = np.random.default_rng(seed)
    return random.integers(1, 1000, (len(seq_lens), width)).astype(np.int32)


@given(seq_lens=lengths, block_size=st.sampled_from([1, 4, 16]), seed=st.integers(0, 9))
def test_equals_a_loop(seq_lens, block_size, seed):
    block_table = tables(seq_lens, block_size, seed)
    table = page_table(np.array(seq_lens, np.int32), block_table, block_size)
    indptr, indices, last = [0], [], []
    for length, row in zip(seq_lens, block_table, strict=True):
        pages = -(-length // block_size)
        indices += row[:pages].tolist()
        indptr.append(len(indices))
        last.append(length - (pages - 1) * block_size if pages else 0)
    assert table.indptr.tolist() == indptr
    assert table.indices.tolist() == indices
    assert table.last_page_len.tolist() == last
    assert table.indptr.dtype == table.indices.dtype == table.last_page_len.dtype == np.int32
    middle = len(seq_lens) // 2
    part = table.rows(middle, len(seq_lens))
    alone = page_table(np.array(seq_lens[middle:], np.int32), block_table[middle:], block_size)
    for name in ("indptr", "indices", "last_page_len"):
        assert getattr(part, name).tolist() == getattr(alone, name).tolist()


@given(rows=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=6))
def test_every_token_knows_its_row_and_position(rows):
    starts = np.cumsum([0, *(count for _, count in rows)]).astype(np.int32)
    seq_lens = np.array([context + count for context, count in rows], np.int32)
    found = zip(*(values.tolist() for values in appended(starts, seq_lens)), strict=True)
    expected = [
        (row, context + i) for row, (context, count) in enumerate(rows) for i in range(count)
    ]
    assert list(found) == expected


def common(seq_lens, block_table, rows, block_size):
    """Leading blocks that all these rows have, without the last block of any."""
    limit = min((seq_lens[row] - 1) // block_size for row in rows)
    length = 0
    while length < limit and len({int(block_table[row, length]) for row in rows}) == 1:
        length += 1
    return length


@given(
    prefix=st.integers(0, 6),
    own=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    others=st.lists(st.integers(1, 60), max_size=4),
    seed=st.integers(0, 9),
)
def test_the_shared_prefix_is_the_longest_one(prefix, own, others, seed):
    size = 4
    seq_lens = [prefix * size + length for length in own] + others
    block_table = tables(seq_lens, size, seed)
    block_table[: len(own), :prefix] = np.arange(2000, 2000 + prefix)
    order = np.random.default_rng(seed).permutation(len(seq_lens))
    seq_lens = np.array(seq_lens, np.int32)[order]
    block_table = block_table[order]
    rows = np.flatnonzero(order < len(own)).tolist()
    found = shared_prefix(seq_lens, block_table, size, min_rows=2, min_pages=2)
    if len(own) >= 2 and prefix >= 2 and common(seq_lens, block_table, rows, size) >= 2:
        assert found is not None
    if found is not None:
        assert len(found.pages) == common(seq_lens, block_table, found.rows.tolist(), size)
        assert (block_table[found.rows, : len(found.pages)] == found.pages).all()
        assert sorted([*found.rows, *found.others]) == list(range(len(seq_lens)))
        skipped = np.full(len(found.rows), len(found.pages), np.int32)
        rest = page_table(seq_lens[found.rows], block_table[found.rows], size, skipped)
        assert (np.diff(rest.indptr) >= 1).all()
        for i, row in enumerate(found.rows):
            pages = -(-int(seq_lens[row]) // size)
            mine = rest.indices[rest.indptr[i] : rest.indptr[i + 1]].tolist()
            assert mine == block_table[row, len(found.pages) : pages].tolist()


def test_rows_that_are_short_or_part_early_do_not_undo_a_shared_prefix():
    size, pages = 4, 10
    seq_lens = np.full(10, pages * size + 3, np.int32)
    block_table = np.arange(10 * 11, dtype=np.int32).reshape(10, 11)
    block_table[:8, :pages] = block_table[0, :pages]
    block_table[8, 0] = block_table[9, 0] = block_table[0, 0]
    seq_lens[9] = size + 1
    found = shared_prefix(seq_lens, block_table, size, min_rows=8, min_pages=5)
    assert found is not None
    assert found.rows.tolist() == list(range(8))
    assert found.others.tolist() == [8, 9]
    assert found.pages.tolist() == block_table[0, :pages].tolist()
