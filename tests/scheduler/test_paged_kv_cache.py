"""The paged KV cache manager by itself: a state machine, and what hashing promises."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager

SLOTS, LENGTH, SIZE = 5, 40, 4


def make(num_blocks=24, prefix_caching=True, groups=1):
    context = KVCacheManagerContext(num_blocks, SIZE, SLOTS, LENGTH, groups, prefix_caching)
    return PagedKVCacheManager(NoOptions(), context)


def ids(*tokens):
    return np.asarray(tokens, np.int32)


class Machine(RuleBasedStateMachine):
    """Writes every token into a model of the pool, and reads each sequence back."""

    def __init__(self):
        super().__init__()
        self.kv = make()
        self.pool = np.full((24, SIZE), -1, np.int64)
        self.tokens = np.zeros((SLOTS, LENGTH), np.int32)
        self.lengths: dict[int, int] = {}

    def _write(self, slot, start):
        for position in range(start, self.lengths[slot]):
            block = self.kv.block_tables[0, slot, position // SIZE]
            users = sum(
                block in self.kv.block_tables[0, other, : self.kv.num_slot_blocks[other]]
                for other in self.lengths
            )
            assert users == 1, "a shared block is written"
            self.pool[block, position % SIZE] = self.tokens[slot, position]
        self.kv.commit(
            np.asarray([slot], np.intp), np.asarray([self.lengths[slot]], np.int64), self.tokens
        )

    def _copy(self, copies):
        for copy in copies:
            self.pool[copy.target, : copy.num_tokens] = self.pool[copy.source, : copy.num_tokens]

    @precondition(lambda self: len(self.lengths) < SLOTS)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def admit(self, prompt):
        slot = min(set(range(SLOTS)) - set(self.lengths))
        tokens = ids(*prompt)
        digest = self.kv.digest(tokens, [])
        match = self.kv.lookup(digest, tokens)
        assert match.num_tokens < len(prompt)
        before = self.kv.stats()
        copies = self.kv.admit(slot, digest, match, len(prompt))
        if copies is None:
            assert self.kv.stats() == before
            return
        self.tokens[slot, : len(prompt)] = tokens
        self.lengths[slot] = len(prompt)
        self._copy(copies)
        self._write(slot, match.num_tokens)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), more=st.integers(1, 9))
    def extend(self, data, more):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        total = min(self.lengths[slot] + more, LENGTH)
        fit = self.kv.extend(np.asarray([slot], np.intp), np.asarray([total], np.int64))
        if not fit:
            return
        start = self.lengths[slot]
        self.tokens[slot, start:total] = data.draw(
            st.lists(st.integers(0, 1), min_size=total - start, max_size=total - start)
        )
        self.lengths[slot] = total
        self._write(slot, start)

    @precondition(lambda self: 0 < len(self.lengths) < SLOTS)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(sorted(self.lengths)))
        child = min(set(range(SLOTS)) - set(self.lengths))
        total = data.draw(st.integers(0, self.lengths[parent] - 1))
        copies = self.kv.fork(parent, child, total)
        if copies is None:
            return
        self._copy(copies)
        self.tokens[child, : total + 1] = self.tokens[parent, : total + 1]
        self.lengths[child] = total + 1
        self._write(child, total)

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def truncate(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        total = data.draw(st.integers(1, self.lengths[slot]))
        if total < self.lengths[slot] and total // SIZE < self.kv._published[slot]:
            return  # published blocks are never taken back by the engine
        self.kv.truncate(slot, total)
        self.lengths[slot] = total

    @precondition(lambda self: self.lengths)
    @rule(data=st.data())
    def release(self, data):
        slot = data.draw(st.sampled_from(sorted(self.lengths)))
        self.kv.release(slot)
        del self.lengths[slot]

    @precondition(lambda self: not self.lengths)
    @rule()
    def reset(self):
        assert self.kv.reset_prefix_cache()
        assert self.kv.stats().num_free == 23

    @invariant()
    def content_is_intact(self):
        self.kv.check()
        for slot, length in self.lengths.items():
            blocks = self.kv.block_tables[0, slot, : self.kv.num_slot_blocks[slot]]
            read = self.pool[blocks].reshape(-1)[:length]
            assert (read == self.tokens[slot, :length]).all()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def fill(kv, slot, tokens, extra=()):
    digest = kv.digest(tokens, list(extra))
    match = kv.lookup(digest, tokens)
    assert kv.admit(slot, digest, match, len(tokens)) is not None
    table = np.zeros((SLOTS, LENGTH), np.int32)
    table[slot, : len(tokens)] = tokens
    kv.commit(np.asarray([slot], np.intp), np.asarray([len(tokens)], np.int64), table)
    return match.num_tokens


def test_salt_separates_and_order_of_keys_matters():
    kv = make()
    prompt = ids(*range(12))
    assert fill(kv, 0, prompt, [b"a"]) == 0
    kv.release(0)
    assert fill(kv, 0, prompt) == 0
    kv.release(0)
    assert fill(kv, 0, prompt, [b"a"]) == 8
    kv.release(0)
    # Length-prefixed keys: ("ab", "c") is not ("a", "bc").
    assert kv.digest(prompt, [b"ab", b"c"]).hashes != kv.digest(prompt, [b"a", b"bc"]).hashes


def test_hash_is_the_documented_chain():
    from hashlib import sha256

    kv = make()
    tokens = ids(*range(8))
    root = sha256(b"").digest()
    first = sha256(root + tokens[:4].astype("<i4").tobytes()).digest()
    second = sha256(first + tokens[4:].astype("<i4").tobytes()).digest()
    assert kv.digest(tokens, []).hashes == [first, second]


def test_least_recently_used_goes_first_and_tails_before_heads():
    kv = make(num_blocks=7)
    fill(kv, 0, ids(*range(8)))
    kv.release(0)
    fill(kv, 0, ids(*range(20, 28)))
    kv.release(0)
    # Two free blocks, then the older chain's tail goes, its head stays.
    fill(kv, 0, ids(*range(40, 52)))
    kv.release(0)
    assert kv.lookup(kv.digest(ids(*range(9)), []), ids(*range(9))).num_tokens == 4
    assert kv.lookup(kv.digest(ids(*range(20, 29)), []), ids(*range(20, 29))).num_tokens == 8


def test_reset_refuses_while_blocks_are_in_use():
    kv = make()
    fill(kv, 0, ids(*range(9)))
    assert not kv.reset_prefix_cache()
    assert kv.stats().num_evictable == 0
    kv.release(0)
    assert kv.stats().num_evictable == 2
    assert kv.reset_prefix_cache()
    assert kv.stats().num_evictable == 0


def test_without_prefix_caching_nothing_is_published():
    kv = make(prefix_caching=False)
    assert fill(kv, 0, ids(*range(12))) == 0
    kv.release(0)
    assert fill(kv, 0, ids(*range(12))) == 0
    assert kv.stats().prefix_queries == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_fork_copies_the_partial_block_of_every_group(groups):
    kv = make(groups=groups)
    fill(kv, 0, ids(*range(10)))
    copies = kv.fork(0, 1, 9)
    assert [(c.group, c.num_tokens) for c in copies] == [(g, 1) for g in range(groups)]
    assert (kv.block_tables[:, 1, :2] == kv.block_tables[:, 0, :2]).all()
    assert kv.block_tables[0, 1, 2] != kv.block_tables[0, 0, 2]
    assert kv.fork(0, 2, 8) == ()
    kv.check()


def test_a_million_blocks_are_no_problem():
    context = KVCacheManagerContext(1_000_000, 16, 256, 8192)
    kv = PagedKVCacheManager(NoOptions(), context)
    assert kv.stats().num_free == 999_999
