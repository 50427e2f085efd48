"""KV cache manager `paged`: fixed-size blocks, chained hashes of full blocks, pluggable eviction.

Prefix reuse: a full block is known by SHA-256(parent hash, its token ids as little-endian int32),
where the parent of the first block is SHA-256 of the request's extra keys. Only blocks whose KV was
computed are published: when an answer depends on it, or while the device computes (`catch_up`). A
block without user keeps its content until its memory is needed; the eviction policy says which goes
first. With a host cache, evicted content goes to the host and comes back on a prefix hit.

(Paged KV: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP'23.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.eviction_policy import EvictionPolicyContext
from octavo.core.contracts.kv_cache_manager import (
    NO_MATCH,
    BlockCopy,
    CopyKind,
    KVCacheManagerContext,
    KVStats,
    Match,
)
from octavo.core.contracts.provider import NoOptions
from octavo.plugins.eviction.lru import LruPolicy
from octavo.plugins.kv_cache_managers.host_pool import HostCache, SwappedSequence
from octavo.plugins.kv_cache_managers.prefix_index import PrefixIndex
from octavo.plugins.kv_cache_managers.tables import BlockTableManager


@dataclass(slots=True)
class Digest:
    """Hashes of the full blocks of `num_tokens` tokens; `root` stands before the first."""

    num_tokens: int
    root: bytes
    hashes: list[bytes] = field(default_factory=list)


_EMPTY = Digest(0, b"")


class Backlog(NamedTuple):
    """Full blocks that are not published yet. keys: hashes that are known. tips: hashes of the
    blocks that others continue, whose own hashes are still to be computed."""

    keys: set[bytes]
    tips: set[bytes]


class PagedKVCacheManager(BlockTableManager):
    """See the module. `_computed[s]`: tokens of a slot whose KV is computed. `_published[s]`: its
    leading blocks that were offered for reuse. `_behind`: whether there may be more to offer;
    `_backlog`: what that is, once it was asked for."""

    uses = frozenset({"swap", "eviction", "host_cache"})

    def __init__(self, options: NoOptions, context: KVCacheManagerContext) -> None:
        super().__init__(context)
        self.prefix_caching = context.prefix_caching
        self._computed = np.zeros(context.max_num_seqs, np.int64)
        self._published = np.zeros(context.max_num_seqs, np.int64)
        self._behind = False
        self._backlog: Backlog | None = None
        self._tokens: NDArray[np.int32] = np.empty((context.max_num_seqs, 0), np.int32)
        self._digests: list[Digest] = [_EMPTY] * context.max_num_seqs
        eviction = context.eviction
        if eviction is None:  # (one that holds nothing is false)
            eviction = LruPolicy(NoOptions(), EvictionPolicyContext(context.num_blocks))
        self._eviction = eviction
        self._index = PrefixIndex(self.num_blocks, eviction)
        self._host = HostCache(context.num_swap_blocks, context.num_host_cache_blocks)
        self._queries = self._hits = 0

    # ---- lookup and admission -------------------------------------------------------------------

    def digest(self, token_ids: NDArray[np.int32], extra: Sequence[bytes]) -> Digest:
        if not self.prefix_caching:
            return Digest(len(token_ids), b"")
        root = sha256(b"".join(len(key).to_bytes(4, "little") + key for key in extra)).digest()
        digest = Digest(len(token_ids), root)
        self._hash_blocks(digest, token_ids, len(token_ids) // self.block_size)
        return digest

    def _hash_blocks(self, digest: Digest, token_ids: NDArray[np.int32], upto: int) -> None:
        """Extend `digest.hashes` to the first `upto` blocks of `token_ids`."""
        hashes, size = digest.hashes, 4 * self.block_size
        parent = hashes[-1] if hashes else digest.root
        first = len(hashes)
        data = token_ids[first * self.block_size : upto * self.block_size].astype("<i4").tobytes()
        for start in range(0, len(data), size):
            parent = sha256(parent + data[start : start + size]).digest()
            hashes.append(parent)

    def lookup(self, digest: Any, token_ids: NDArray[np.int32]) -> Match:
        """The match's handle: blocks, 0 where the content is on the host."""
        limit = (digest.num_tokens - 1) // self.block_size
        blocks = self._find(digest.hashes, limit)
        if self._behind and self._may_continue(digest, len(blocks), limit):
            self.catch_up()
            blocks = self._find(digest.hashes, limit)
        return Match(len(blocks) * self.block_size, blocks) if blocks else NO_MATCH

    def _find(self, hashes: list[bytes], limit: int) -> list[int]:
        cached, host = self._index.block_of, self._host
        blocks: list[int] = []
        for key in hashes[:limit]:
            block = cached.get(key, 0)
            if not block and key not in host:
                break
            blocks.append(block)
        return blocks

    def _may_continue(self, digest: Digest, count: int, limit: int) -> bool:
        """Whether a block that is still to be published may be the next one after `count`."""
        if count == limit:
            return False
        if self._backlog is None:
            self._backlog = self._find_backlog()
        before = digest.hashes[count - 1] if count else digest.root
        return digest.hashes[count] in self._backlog.keys or before in self._backlog.tips

    def _find_backlog(self) -> Backlog:
        full = self._computed // self.block_size
        slots = (full > self._published).nonzero()[0]
        backlog = Backlog(set(), set())
        ranges = slots.tolist(), self._published[slots].tolist(), full[slots].tolist()
        for slot, begin, end in zip(*ranges, strict=True):
            digest = self._digests[slot]
            backlog.keys.update(digest.hashes[begin:end])
            if len(digest.hashes) < end:
                backlog.tips.add(digest.hashes[-1] if digest.hashes else digest.root)
        return backlog

    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        matched: list[int] = match.handle or []
        shared = [block for block in matched if block]
        needed = -(-total // self.block_size) - len(shared)
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if needed > self.num_available - revived:
            return None
        self._take_shared(shared)
        # The slot's own copy: it grows with the output.
        own = Digest(digest.num_tokens, digest.root, list(digest.hashes))
        if len(shared) == len(matched):
            self._fill_table(slot, shared, self._allocate_many(needed))
        else:
            self._fetch(slot, own, matched, needed)
        self._digests[slot] = own
        self._published[slot] = len(matched)
        if self.prefix_caching:
            self._count(digest, len(matched), len(shared))
        return self.take_copies()

    def _fetch(self, slot: int, digest: Digest, matched: list[int], needed: int) -> None:
        """Fill the slot's table; blocks whose content is on the host get it from there."""
        keys = [key for key, block in zip(digest.hashes, matched, strict=False) if not block]
        # Held on to, because what the new blocks evict goes to the host.
        sources = [self._host.take(key) for key in keys]
        new = self._allocate_many(needed)
        targets, rest = new[: len(keys)].tolist(), new[len(keys) :]
        size = self.block_size
        self._copy(
            ((s, t, size) for s, t in zip(sources, targets, strict=True)), CopyKind.TO_DEVICE
        )
        for key, source in zip(keys, sources, strict=True):
            self._host.put_back(key, source)
        arriving = iter(targets)
        self._fill_table(slot, [block or next(arriving) for block in matched], rest)
        for index, block in enumerate(matched):
            if not block:  # the copies run before any step that could read it
                before = digest.hashes[index - 1] if index else None
                self._index.put(digest.hashes[index], int(self._table[slot, index]), before)

    def _count(self, digest: Digest, num_matched: int, num_shared: int) -> None:
        size, host = self.block_size, self._host
        self._queries += digest.num_tokens
        self._hits += num_matched * size
        if host.num_blocks:
            host.queries += digest.num_tokens - num_shared * size
            host.hits += (num_matched - num_shared) * size

    # ---- publication and release ----------------------------------------------------------------

    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        if self.prefix_caching:
            self._computed[slots] = totals
            self._tokens, self._behind, self._backlog = tokens, True, None

    def catch_up(self) -> None:
        if not self._behind:
            return
        self._behind, self._backlog = False, None
        full = self._computed // self.block_size
        slots = (full > self._published).nonzero()[0]
        if not len(slots):
            return
        first, last = self._published[slots], full[slots]
        self._published[slots] = last
        one = last - first == 1
        if one.all():
            self._publish_one_each(slots, first)
            return
        self._publish_one_each(slots[one], first[one])
        runs = slots[~one].tolist(), first[~one].tolist(), last[~one].tolist()
        for slot, begin, end in zip(*runs, strict=True):
            self._publish_run(slot, begin, end)

    def _catch_up_with(self, slot: int) -> None:
        """Publish what is full of one slot."""
        begin, end = int(self._published[slot]), int(self._computed[slot]) // self.block_size
        if end > begin:
            self._published[slot] = end
            self._publish_run(slot, begin, end)

    def _publish_run(self, slot: int, begin: int, end: int) -> None:
        """The blocks with index `begin` to `end` - 1 of a slot are full."""
        digest = self._digests[slot]
        hashes = digest.hashes
        if len(hashes) < end:
            self._hash_blocks(digest, self._tokens[slot], end)
        before = hashes[begin - 1] if begin else None
        self._index.put_run(hashes[begin:end], self._table[slot, begin:end].tolist(), before)

    def _publish_one_each(self, slots: NDArray[np.intp], first: NDArray[np.int64]) -> None:
        """The block with index `first[i]` of each slot is full: the usual case in decoding."""
        size, put = self.block_size, self._index.put
        columns = first[:, None] * size + np.arange(size)
        data = self._tokens[slots[:, None], columns].astype("<i4", copy=False).tobytes()
        blocks, start = self._table[slots, first].tolist(), 0
        for slot, index, block in zip(slots.tolist(), first.tolist(), blocks, strict=True):
            digest = self._digests[slot]
            hashes = digest.hashes
            before = hashes[index - 1] if index else None
            if len(hashes) == index:
                key = sha256((before or digest.root) + data[start : start + 4 * size]).digest()
                hashes.append(key)
            put(hashes[index], block, before)
            start += 4 * size

    def truncate(self, slot: int, total: int) -> None:
        self._catch_up_with(slot)
        super().truncate(slot, total)
        full = total // self.block_size
        self._computed[slot] = min(int(self._computed[slot]), total)
        self._published[slot] = min(int(self._published[slot]), full)
        del self._digests[slot].hashes[full:]

    def _is_known(self, slot: int, index: int) -> bool:
        block = self._table[slot, index]
        return super()._is_known(slot, index) or self._index.hash_of[block] is not None

    def release(self, slot: int) -> None:
        if self._behind:
            self._catch_up_with(slot)
        super().release(slot)

    def _forget_slot(self, slot: int) -> None:
        self._computed[slot] = self._published[slot] = 0
        self._digests[slot] = _EMPTY

    # ---- forks and swapping ---------------------------------------------------------------------

    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        if self.num_available < 1:
            return None
        self._catch_up_with(parent)
        full, partial = divmod(total, self.block_size)
        shared = self._table[parent, :full].tolist()
        self._refs[shared] += 1
        own = self._allocate_many(1)
        self._fill_table(child, shared, own)
        origin = self._digests[parent]
        self._digests[child] = Digest(total, origin.root, origin.hashes[:full])
        self._published[child] = min(int(self._published[parent]), full)
        if self.prefix_caching:
            self._queries += total + 1
            self._hits += total
        if partial:
            source = int(self._table[parent, full])
            self._copy([(source, int(own[0]), partial)], CopyKind.DEVICE)
        return self.take_copies()

    def _swap_state(self, slot: int) -> Digest:
        self._catch_up_with(slot)
        return self._digests[slot]

    def _shared_on_return(self, swapped: SwappedSequence) -> list[int]:
        self.catch_up()
        digest: Digest = swapped.state
        shared: list[int] = []
        for key in digest.hashes[: swapped.num_tokens // self.block_size]:
            block = self._index.block_of.get(key)
            if block is None:
                break
            shared.append(block)
        return shared

    def _swapped_in(self, slot: int, swapped: SwappedSequence, num_shared: int) -> None:
        self._digests[slot] = swapped.state
        self._published[slot] = num_shared

    # ---- blocks ---------------------------------------------------------------------------------

    def _num_evictable(self) -> int:
        return len(self._eviction)

    def _take_shared(self, blocks: list[int]) -> None:
        if blocks:
            self._eviction.reuse(blocks)
            self._refs[blocks] += 1

    def _retire(self, blocks: list[int]) -> None:
        hash_of = self._index.hash_of
        kept = [block for block in blocks if hash_of[block] is not None]
        if kept:
            self._eviction.retire(kept)
        if len(kept) < len(blocks):
            self._free.give([block for block in blocks if hash_of[block] is None])

    def _evict(self, count: int) -> list[int]:
        blocks = self._eviction.evict(count)
        for block in blocks:
            key = self._index.forget(block)
            if self._host.num_blocks:
                target = self._host.store(key)
                if target is not None:
                    self._copy([(block, target, self.block_size)], CopyKind.TO_HOST)
        return blocks

    # ---- inspection -----------------------------------------------------------------------------

    def stats(self) -> KVStats:
        host = self._host
        return KVStats(
            self.num_blocks - 1,
            len(self._free),
            len(self._eviction),
            self._queries,
            self._hits,
            self._swap.num_blocks,
            self._swap.num_free,
            host.num_blocks,
            len(host),
            host.queries,
            host.hits,
        )

    def reset_prefix_cache(self) -> bool:
        if self.num_available < self.num_blocks - 1:
            return False
        blocks = self._eviction.evict(len(self._eviction))
        for block in blocks:
            self._index.forget(block)
        self._free.give(blocks)
        self._host.clear()
        return True

    def _evictable(self) -> Iterable[int]:
        return self._eviction.blocks()

    def check(self) -> None:
        super().check()
        free = set(self._free.blocks().tolist())
        for key, block in self._index.block_of.items():
            assert self._index.hash_of[block] == key, f"block {block}: hash and table disagree"
            assert block not in free, f"block {block} is free and published"
        self._host.check()
