"""Eviction policies: order, and a model that they must agree with about what is evictable."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.eviction.lfu import LfuPolicy
from octavo.plugins.eviction.lru import LruPolicy
from octavo.plugins.eviction.prefix_aware import PrefixAwarePolicy
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager

BLOCKS = 10
POLICIES = [LruPolicy, LfuPolicy, PrefixAwarePolicy]


def make(policy, num_blocks=BLOCKS):
    return policy(NoOptions(), EvictionPolicyContext(num_blocks))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_whatever_happens_each_block_is_evictable_or_not(data, policy):
    eviction = make(policy)
    blank, used, evictable = set(range(1, BLOCKS)), set(), []
    for _ in range(data.draw(st.integers(0, 60))):
        action = data.draw(st.sampled_from(["fill", "retire", "reuse", "evict"]))
        if action == "fill" and blank:
            block = min(blank)
            parents = [0, *sorted(used), *sorted(evictable)]
            eviction.link(block, data.draw(st.sampled_from(parents)))
            blank.discard(block)
            used.add(block)
        elif action == "retire" and used:
            chosen = data.draw(st.permutations(sorted(used)))[: data.draw(st.integers(1, 3))]
            eviction.retire(chosen)
            evictable += chosen
            used -= set(chosen)
        elif action == "reuse" and used | set(evictable):
            known = sorted(used | set(evictable))
            chosen = data.draw(st.permutations(known))[: data.draw(st.integers(1, 3))]
            eviction.reuse(chosen)
            evictable = [block for block in evictable if block not in chosen]
            used |= set(chosen)
        elif action == "evict" and evictable:
            count = data.draw(st.integers(1, len(evictable)))
            taken = eviction.evict(count)
            assert len(set(taken)) == count
            if policy is LruPolicy:
                assert taken == evictable[:count]
            assert set(taken) <= set(evictable)
            evictable = [block for block in evictable if block not in taken]
            blank |= set(taken)
        assert sorted(eviction.blocks()) == sorted(evictable)
        assert len(eviction) == len(evictable)


def test_lru_is_by_time_of_retirement():
    eviction = make(LruPolicy)
    eviction.retire([3, 2, 1])
    eviction.retire([5])
    eviction.reuse([2])
    assert list(eviction.blocks()) == [3, 1, 5]
    eviction.retire([2])
    assert eviction.evict(2) == [3, 1]
    assert eviction.evict(2) == [5, 2]
    assert len(eviction) == 0


def hit(eviction, block, times=1):
    for _ in range(times):
        eviction.reuse([block])
        eviction.retire([block])


def test_lfu_counts_hits():
    eviction = make(LfuPolicy)
    eviction.retire([1, 2, 3])
    hit(eviction, 1)
    assert eviction.evict(2) == [2, 3]
    eviction.retire([2])  # with new content: its hits are forgotten
    assert eviction.evict(2) == [2, 1]


def test_lfu_lets_go_in_the_end_of_what_was_popular_long_ago():
    eviction = make(LfuPolicy)
    eviction.retire([1, 2])
    hit(eviction, 1, times=3)
    hit(eviction, 2, times=2)
    assert eviction.evict(1) == [2]
    eviction.retire([3])
    hit(eviction, 3)  # one hit now weighs as much as three before the eviction
    assert eviction.evict(1) == [1]


def chain(eviction, *blocks):
    for parent, block in zip((0, *blocks), blocks, strict=False):
        eviction.link(block, parent)


def test_prefix_aware_counts_chains_through_a_block():
    eviction = make(PrefixAwarePolicy)
    chain(eviction, 1, 2, 3)
    eviction.link(4, 2)
    eviction.link(5, 1)
    eviction.link(6, 4)
    assert [eviction.chains(b) for b in range(1, 7)] == [3, 2, 1, 1, 1, 1]
    eviction.retire([3, 2, 1, 6, 4, 5])
    assert eviction.evict(1) == [3]
    eviction.link(3, 2)  # a further continuation, though the first one is gone
    assert [eviction.chains(b) for b in (1, 2, 3)] == [4, 3, 1]
    assert eviction.evict(5) == [6, 4, 5, 2, 1]
    eviction.link(1, 3)
    eviction.link(2, 1)
    eviction.link(4, 1)  # what 3 continued is gone: nothing is counted there
    assert [eviction.chains(b) for b in (1, 2, 3)] == [2, 1, 2]


def rows(kv, slot, tokens):
    digest = kv.digest(tokens, [])
    match = kv.lookup(digest, tokens)
    assert kv.admit(slot, digest, match, len(tokens)) is not None
    table = np.zeros((1, 64), np.int32)
    table[0, : len(tokens)] = tokens
    kv.commit(np.asarray([0], np.intp), np.asarray([len(tokens)], np.int64), table)
    kv.release(slot)
    return match.num_tokens


@pytest.mark.parametrize(
    ("policy", "kept"), [(LruPolicy, 0), (LfuPolicy, 8), (PrefixAwarePolicy, 8)]
)
def test_what_many_prompts_begin_with_outlasts_a_flood(policy, kept):
    """Ten prompts begin alike, then come four that nobody repeats."""
    eviction = make(policy, 17)
    kv = PagedKVCacheManager(NoOptions(), KVCacheManagerContext(17, 4, 1, 64, eviction=eviction))
    system = list(range(100, 108))
    for number in range(10):
        rows(kv, 0, np.asarray([*system, number, number, number, number, 1], np.int32))
    for number in range(4):
        rows(kv, 0, np.arange(28, dtype=np.int32) + 1000 * number)
    tokens = np.asarray([*system, 99], np.int32)
    assert kv.lookup(kv.digest(tokens, []), tokens).num_tokens == kept
    kv.check()
