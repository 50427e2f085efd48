"""Every KV cache manager by itself: a state machine that reads each sequence back."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.kv_cache_manager import CopyKind, KVCacheManagerContext
from octavo.core.contracts.provider import NoOptions
from octavo.core.errors import CapacityError
from octavo.plugins.eviction.lfu import LfuPolicy
from octavo.plugins.eviction.lru import LruPolicy
from octavo.plugins.eviction.prefix_aware import PrefixAwarePolicy
from octavo.plugins.kv_cache_managers.none import UnsharedKVCacheManager
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager
from octavo.plugins.kv_cache_managers.radix import RadixKVCacheManager

SLOTS, LENGTH, SIZE = 5, 40, 4
MANAGERS = {
    "paged": PagedKVCacheManager,
    "radix": RadixKVCacheManager,
    "none": UnsharedKVCacheManager,
}
EVICTION = {"lru": LruPolicy, "lfu": LfuPolicy, "prefix_aware": PrefixAwarePolicy}


def make(name, num_blocks=24, eviction="lru", **context):
    context = KVCacheManagerContext(
        num_blocks,
        SIZE,
        SLOTS,
        LENGTH,
        eviction=EVICTION[eviction](NoOptions(), EvictionPolicyContext(num_blocks)),
        **context,
    )
    return MANAGERS[name](NoOptions(), context)


def ids(*tokens):
    return np.asarray(tokens, np.int32)


class Machine(RuleBasedStateMachine):
    """Writes every token into a model of the device's pool and the host's, runs the copies that the
    manager asks for, and reads each sequence back through its block table."""

    @initialize(
        name=st.sampled_from(sorted(MANAGERS)),
        eviction=st.sampled_from(sorted(EVICTION)),
        num_blocks=st.sampled_from([12, 24]),
        swap=st.sampled_from([0, 3, 12]),
        cache=st.sampled_from([-1, 0, 1, 4, 16]),
    )
    def start(self, name, eviction, num_blocks, swap, cache):
        prefix_caching = cache >= 0  # or the baseline
        cache = max(cache, 0) if name == "paged" else 0
        self.kv = make(
            name,
            num_blocks,
            eviction,
            prefix_caching=prefix_caching,
            num_swap_blocks=swap,
            num_host_cache_blocks=cache,
        )
        self.pool = np.full((num_blocks, SIZE), -1, np.int64)
        self.host = np.full((swap + cache, SIZE), -1, np.int64)
        self.tokens = np.zeros((SLOTS, LENGTH), np.int32)
        self.lengths: dict[int, int] = {}
        self.swapped: list[tuple[object, np.ndarray]] = []

    def _blocks(self, slot):
        return self.kv.block_tables[0, slot, : self.kv.num_slot_blocks[slot]].tolist()

    def _free_slot(self):
        return min(set(range(SLOTS)) - set(self.lengths))

    def _write(self, slot, start):
        for position in range(start, self.lengths[slot]):
            block = self.kv.block_tables[0, slot, position // SIZE]
            users = sum(block in self._blocks(other) for other in self.lengths)
            assert users == 1, "a shared block is written"
            self.pool[block, position % SIZE] = self.tokens[slot, position]
        self.kv.commit(
            np.asarray([slot], np.intp), np.asarray([self.lengths[slot]], np.int64), self.tokens
        )

    def _copy(self, copies):
        for copy in copies:
            reads = self.host if copy.kind == CopyKind.TO_DEVICE else self.pool
            writes = self.host if copy.kind == CopyKind.TO_HOST else self.pool
            values = reads[copy.source, : copy.num_tokens].copy()
            assert (values >= 0).all(), "a copy reads what was never written"
            writes[copy.target] = -1
            writes[copy.target, : copy.num_tokens] = values

    @precondition(lambda self: len(self.lengths) < SLOTS)
    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24),
        salt=st.sampled_from([[], [], [], [b"a"]]),
    )
    def admit(self, prompt, salt):
        slot, tokens = self._free_slot(), ids(*prompt)
        digest = self.kv.digest(tokens, salt)
        match = self.kv.lookup(digest, tokens)
        assert match.num_tokens < len(prompt)
        before = self.kv.stats()
        copies = self.kv.admit(slot, digest, match, len(prompt))
        if copies is None:
            assert self.kv.stats() == before
            needed = -(-len(prompt) // SIZE)
            assert needed > before.num_free + before.num_evictable - match.num_tokens // SIZE
            return
        self.tokens[slot, : len(prompt)] = tokens
        self.lengths[slot] = len(prompt)
        self._copy(copies)
        self._write(slot, match.num_tokens)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(1, 9))
    def extend(self, data, more):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        start = self.lengths[slot]
        total = min(start + more, LENGTH)
        fit = self.kv.extend(np.asarray([slot], np.intp), np.asarray([total], np.int64))
        self._copy(self.kv.take_copies())
        if not fit:
            return
        size = total - start
        self.tokens[slot, start:total] = data.draw(
            st.lists(st.integers(0, 1), min_size=size, max_size=size)
        )
        self.lengths[slot] = total
        self._write(slot, start)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(1, 9))
    def extend_and_truncate(self, data, more):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        length = self.lengths[slot]
        total = min(length + more, LENGTH)
        if self.kv.extend(np.asarray([slot], np.intp), np.asarray([total], np.int64)):
            self.kv.truncate(slot, length)
        self._copy(self.kv.take_copies())

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def truncate(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        total = data.draw(st.integers(1, self.lengths[slot]))
        before = self.kv.stats()
        try:
            self.kv.truncate(slot, total)
        except CapacityError:
            assert self.kv.stats() == before
            assert before.num_free + before.num_evictable == 0
            return
        self._copy(self.kv.take_copies())
        self.lengths[slot] = total

    @rule()
    def catch_up(self):
        self.kv.catch_up()

    @precondition(lambda self: 0 < len(self.lengths) < SLOTS)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.lengths)))
        child = self._free_slot()
        total = data.draw(st.integers(0, self.lengths[parent] - 1))
        copies = self.kv.fork(parent, child, total)
        if copies is None:
            assert child not in self.lengths
            assert not self.kv.num_slot_blocks[child]
            return
        self._copy(copies)
        self.tokens[child, : total + 1] = self.tokens[parent, : total + 1]
        self.lengths[child] = total + 1
        self._write(child, total)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.kv.release(slot)
        del self.lengths[slot]
        self.kv.release(slot)  # nothing happens to an empty slot

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def swap_out(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        length, before = self.lengths[slot], self.kv.stats()
        swapped = self.kv.swap_out(slot, length)
        if swapped is None:
            assert self.kv.stats() == before
            assert before.num_free_swap_blocks < -(-length // SIZE)
            return
        self._copy(swapped.copies)
        self.swapped.append((swapped.handle, self.tokens[slot, :length].copy()))
        del self.lengths[slot]

    @precondition(lambda self: self.swapped and len(self.lengths) < SLOTS)
    @rule(data=st.data(), more=st.integers(0, 5))
    def swap_in(self, data, more):
        index = data.draw(st.integers(0, len(self.swapped) - 1))
        handle, tokens = self.swapped[index]
        total = min(len(tokens) + more, LENGTH)
        slot, before = self._free_slot(), self.kv.stats()
        copies = self.kv.swap_in(slot, handle, total)
        if copies is None:
            assert self.kv.stats() == before
            return
        del self.swapped[index]
        self._copy(copies)
        self.tokens[slot, : len(tokens)] = tokens
        self.tokens[slot, len(tokens) : total] = 1
        self.lengths[slot] = total
        self._write(slot, len(tokens))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_drop(self, data):
        index = data.draw(st.integers(0, len(self.swapped) - 1))
        self.kv.swap_drop(self.swapped.pop(index)[0])

    @precondition(lambda self: not self.lengths)
    @rule()
    def reset(self):
        assert self.kv.reset_prefix_cache()
        assert self.kv.stats().num_free == self.kv.stats().num_blocks
        assert self.kv.stats().host_cache_used == 0

    @invariant()
    def content_is_intact(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for slot, length in self.lengths.items():
            read = self.pool[self._blocks(slot)].reshape(-1)[:length]
            assert (read == self.tokens[slot, :length]).all()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def fill(kv, slot, tokens, extra=()):
    """Admit and compute; returns how many tokens were found."""
    digest = kv.digest(tokens, list(extra))
    match = kv.lookup(digest, tokens)
    assert kv.admit(slot, digest, match, len(tokens)) is not None
    table = np.zeros((SLOTS, LENGTH), np.int32)
    table[slot, : len(tokens)] = tokens
    kv.commit(np.asarray([slot], np.intp), np.asarray([len(tokens)], np.int64), table)
    return match.num_tokens


def found(kv, tokens):
    return kv.lookup(kv.digest(tokens, []), tokens).num_tokens


def test_radix_matches_to_the_token_and_copies_the_rest_of_the_block():
    kv = make("radix")
    fill(kv, 0, ids(*range(11)))
    # Full blocks are known while the sequence runs, its last tokens when it leaves.
    assert found(kv, ids(*range(11), 99)) == 8
    kv.release(0)
    assert found(kv, ids(*range(11), 99)) == 11
    assert found(kv, ids(0, 1, 2, 99)) == 3
    assert found(kv, ids(99, 0, 1)) == 0
    tokens = ids(*range(10), 99, 98)
    digest = kv.digest(tokens, [])
    match = kv.lookup(digest, tokens)
    copies = kv.admit(1, digest, match, 12)
    (copy,) = copies
    assert (copy.num_tokens, copy.kind) == (2, CopyKind.DEVICE)
    assert copy.target == kv.block_tables[0, 1, 2]
    assert copy.source not in kv.block_tables[0, 1]
    assert kv.stats().prefix_hits == 10


def test_radix_splits_where_prefixes_part():
    kv = make("radix")
    for slot, tail in enumerate(([7, 7], [8, 8], [9])):
        fill(kv, slot, ids(*range(6), *tail))
        kv.release(slot)
    # One node for what they share, one for each tail.
    assert kv._tree.num_nodes == 4
    for tail in ([7, 7, 1], [8, 8, 1], [9, 1]):
        assert found(kv, ids(*range(6), *tail)) == 5 + len(tail)
    kv.check()


def test_radix_gives_up_tails_first_and_the_least_recent_branch():
    kv = make("radix", num_blocks=8)
    fill(kv, 0, ids(*range(12)))
    kv.release(0)
    fill(kv, 0, ids(*range(20, 32)))
    kv.release(0)
    fill(kv, 0, ids(*range(40, 52)))  # one block is free, two are taken from the older branch
    kv.check()
    assert found(kv, ids(*range(13))) == 4
    assert found(kv, ids(*range(20, 33))) == 12


def test_radix_does_not_continue_a_branch_that_was_cut_and_grew_again():
    kv = make("radix", num_blocks=8)
    fill(kv, 0, ids(*range(12)))
    kv.release(0)
    assert fill(kv, 1, ids(*range(12))) == 11
    fill(kv, 2, ids(*range(20, 36)))  # takes the last block of the branch that slot 1 ends in
    kv.release(2)
    fork = [*range(8), 50, 51, 52, 53]
    assert fill(kv, 3, ids(*fork)) == 8
    kv.extend(np.asarray([1], np.intp), np.asarray([16], np.int64))
    table = np.zeros((SLOTS, LENGTH), np.int32)
    table[1, :16] = range(16)
    kv.commit(np.asarray([1], np.intp), np.asarray([16], np.int64), table)
    assert found(kv, ids(*range(16), 99)) == 16
    assert found(kv, ids(*fork, 12, 13, 14, 15, 99)) == 12
    kv.check()


def test_radix_keeps_salts_apart():
    kv = make("radix")
    fill(kv, 0, ids(*range(12)), [b"a"])
    assert found(kv, ids(*range(12))) == 0
    assert fill(kv, 1, ids(*range(12)), [b"a"]) == 11


def test_none_shares_nothing_and_a_fork_copies_everything():
    kv = make("none")
    assert fill(kv, 0, ids(*range(10))) == 0
    assert found(kv, ids(*range(10))) == 0
    copies = kv.fork(0, 1, 9)
    assert [(c.num_tokens, c.kind) for c in copies] == [(4, 0), (4, 0), (1, 0)]
    assert not set(kv.block_tables[0, 0, :3].tolist()) & set(kv.block_tables[0, 1, :3].tolist())
    kv.release(0)
    kv.release(1)
    assert kv.stats().num_free == 23
    assert kv.reset_prefix_cache()


@pytest.mark.parametrize("name", sorted(MANAGERS))
def test_swapping_copies_what_was_computed_and_no_more(name):
    kv = make(name, num_swap_blocks=4, num_groups=2)
    fill(kv, 0, ids(*range(10)))
    kv.extend(np.asarray([0], np.intp), np.asarray([20], np.int64))
    kv.take_copies()
    sources = kv.block_tables[0, 0, :3].tolist()
    swapped = kv.swap_out(0, 10)
    assert [(c.group, c.kind) for c in swapped.copies] == [(0, 1), (1, 1)] * 3
    assert [c.source for c in swapped.copies[::2]] == sources
    assert [c.num_tokens for c in swapped.copies[::2]] == [4, 4, 2]
    assert kv.num_slot_blocks[0] == 0
    assert kv.stats().num_free_swap_blocks == 1
    assert kv.swap_out(0, 0) is not None  # nothing needs no room
    fill(kv, 1, ids(*range(50, 70)))
    assert kv.swap_out(1, 20) is None
    back = kv.swap_in(3, swapped.handle, 12)
    # Full blocks that are still on the device are shared.
    full = 0 if name == "none" else 2
    assert [c.num_tokens for c in back[::2]] == [4, 4, 2][full:]
    assert {c.kind for c in back} == {CopyKind.TO_DEVICE}
    assert kv.num_slot_blocks[3] == 3
    kv.check()


def test_evicted_content_comes_back_from_the_host():
    kv = make("paged", num_blocks=8, num_host_cache_blocks=3, num_swap_blocks=2)
    fill(kv, 0, ids(*range(12)))
    kv.release(0)
    fill(kv, 0, ids(*range(20, 44)))  # takes six blocks: four are free
    assert found(kv, ids(*range(13))) == 12
    assert kv.stats().host_cache_used == 2
    kv.release(0)
    tokens = ids(*range(13))
    digest = kv.digest(tokens, [])
    match = kv.lookup(digest, tokens)
    copies = kv.admit(1, digest, match, 13)
    back = [c for c in copies if c.kind == CopyKind.TO_DEVICE]
    assert [c.target for c in back] == kv.block_tables[0, 1, 1:3].tolist()
    assert all(c.source >= 2 for c in back), "that is swap space"
    stats = kv.stats()
    # The second lookup found 4 tokens on the device and 8 of the other 9 on the host.
    assert (stats.host_cache_queries, stats.host_cache_hits) == (12 + 24 + 9, 8)
    assert stats.prefix_hits == 12
    kv.check()


def test_the_host_cache_never_overwrites_what_is_being_fetched():
    kv = make("paged", num_blocks=5, num_host_cache_blocks=2)
    fill(kv, 0, ids(*range(8)))
    kv.release(0)
    fill(kv, 0, ids(*range(20, 36)))
    kv.release(0)
    tokens = ids(*range(9))
    digest = kv.digest(tokens, [])
    copies = kv.admit(1, digest, kv.lookup(digest, tokens), 9)
    written = [c.target for c in copies if c.kind == CopyKind.TO_HOST]
    read = [c.source for c in copies if c.kind == CopyKind.TO_DEVICE]
    assert len(read) == 2
    assert not set(read) & set(written)
    kv.check()


def test_memory_by_cached_block_and_a_million_blocks():
    import tracemalloc

    context = KVCacheManagerContext(1_000_000, 16, 256, 8192)
    kv = PagedKVCacheManager(NoOptions(), context)
    assert kv.stats().num_free == 999_999

    count, rows = 20_000, 50
    each = count // rows
    context = KVCacheManagerContext(count + 1, 16, 1, each * 16)
    kv = PagedKVCacheManager(NoOptions(), context)
    table = np.zeros((1, each * 16), np.int32)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for row in range(rows):
        table[0] = np.arange(each * 16) + row
        digest = kv.digest(table[0], [])
        kv.admit(0, digest, kv.lookup(digest, table[0]), each * 16)
        kv.commit(np.asarray([0], np.intp), np.asarray([each * 16], np.int64), table)
        kv.release(0)
        digest = None
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert kv.stats().num_evictable == count
    # What the empty pool had anyway: a list entry and an array element or two a block.
    fixed = 8 + 4 + 8
    assert used / count + fixed < 200
