"""The paged KV cache manager by itself: what hashing and eviction promise."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager

SLOTS, LENGTH, SIZE = 5, 40, 4


def make(num_blocks=24, prefix_caching=True, groups=1):
    context = KVCacheManagerContext(num_blocks, SIZE, SLOTS, LENGTH, groups, prefix_caching)
    return PagedKVCacheManager(NoOptions(), context)


def ids(*tokens):
    return np.asarray(tokens, np.int32)


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
