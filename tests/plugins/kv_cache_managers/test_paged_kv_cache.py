"""The paged KV cache manager by itself: what hashing and eviction promise."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.provider import NoOptions
from octavo.core.errors import CapacityError
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


def test_hashing_waits_until_an_answer_depends_on_it():
    kv = make()
    fill(kv, 0, ids(*range(6)))
    grow(kv, 0, ids(*range(8)))
    assert kv._index.block_of == {}, "published at commit"
    # A lookup that nothing of it could answer leaves it where it is; others get it done.
    assert found(kv, ids(99, *range(9))) == 0
    kv.catch_up()
    assert len(kv._index.block_of) == 2
    grow(kv, 0, ids(*range(12)))
    assert found(kv, ids(*range(4), 99)) == 4
    assert len(kv._index.block_of) == 2
    assert found(kv, ids(*range(13))) == 12
    assert len(kv._index.block_of) == 3
    grow(kv, 0, ids(*range(16)))
    kv.release(0)
    assert found(kv, ids(*range(17))) == 16
    kv.check()


def grow(kv, slot, tokens):
    """A sequence goes on to these tokens."""
    slots, totals = np.asarray([slot], np.intp), np.asarray([len(tokens)], np.int64)
    assert kv.extend(slots, totals) == 1
    table = np.zeros((SLOTS, LENGTH), np.int32)
    table[slot, : len(tokens)] = tokens
    kv.commit(slots, totals, table)


def found(kv, tokens):
    return kv.lookup(kv.digest(tokens, []), tokens).num_tokens


def test_truncating_into_a_known_block_copies_it():
    kv = make()
    fill(kv, 0, ids(*range(12)))
    old = kv.block_tables[0, 0, :3].tolist()
    kv.truncate(0, 6)
    (copy,) = kv.take_copies()
    assert (copy.source, copy.target, copy.num_tokens) == (old[1], kv.block_tables[0, 0, 1], 2)
    assert copy.target != old[1]
    # It goes on differently: both ways are known, each under its own content.
    grow(kv, 0, ids(*range(6), 50, 51, 52))
    assert found(kv, ids(*range(13))) == 12
    assert found(kv, ids(*range(6), 50, 51, 99)) == 8
    kv.release(0)
    kv.check()


def test_truncating_into_a_block_of_others_needs_a_free_one():
    kv = make(num_blocks=4)
    fill(kv, 0, ids(*range(8)))
    assert kv.fork(0, 1, 4) == ()
    kv.truncate(1, 4)
    fill(kv, 2, ids(50, 51))
    before = kv.stats()
    assert before.num_free + before.num_evictable == 0
    with pytest.raises(CapacityError, match="slot 1 cannot be cut to 2 tokens"):
        kv.truncate(1, 2)
    assert kv.stats() == before
    kv.release(2)
    kv.truncate(1, 2)
    assert [c.num_tokens for c in kv.take_copies()] == [2]
    assert kv.block_tables[0, 1, 0] != kv.block_tables[0, 0, 0]
    kv.check()
