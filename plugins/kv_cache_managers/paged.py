"""KV cache manager `paged`: fixed-size blocks, chained hashes of full blocks, LRU eviction.

Prefix reuse: a full block is known by SHA-256(parent hash, its token ids as little-endian int32),
where the parent of the first block is SHA-256 of the request's extra keys. Only blocks whose KV was
computed are published. A block without user keeps its content on an LRU list until its memory is
needed; blocks later in a sequence are evicted before those they continue.

(Paged KV: Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", SOSP'23.)

Every KV group uses the same block numbers: a block id stands for one block in each group's pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import (
    NO_MATCH,
    BlockCopy,
    KVCacheManager,
    KVCacheManagerContext,
    KVStats,
    Match,
)
from octavo.core.contracts.provider import NoOptions


@dataclass(slots=True)
class Digest:
    """Hashes of the full blocks of `num_tokens` tokens; `root` stands before the first."""

    num_tokens: int
    root: bytes
    hashes: list[bytes] = field(default_factory=list)


_EMPTY = Digest(0, b"")


class PagedKVCacheManager(KVCacheManager):
    """See the module. `num_slot_blocks[s]` entries of `block_tables[:, s]` are in use."""

    def __init__(self, options: NoOptions, context: KVCacheManagerContext) -> None:
        self.block_size = context.block_size
        self.prefix_caching = context.prefix_caching
        self.num_blocks = context.num_blocks
        self._groups = range(context.num_groups)
        self._max_blocks = -(-context.max_model_len // self.block_size)
        # An odd row length: rows a power of two apart would share cache sets.
        row = self._max_blocks | 1
        table = np.zeros((context.max_num_seqs, row), np.int32)
        self._table = table[:, : self._max_blocks]
        self.block_tables = np.broadcast_to(self._table, (context.num_groups, *self._table.shape))
        self.num_slot_blocks = np.zeros(context.max_num_seqs, np.int32)
        self._published = np.zeros(context.max_num_seqs, np.int64)
        self._digests: list[Digest] = [_EMPTY] * context.max_num_seqs
        self._refs = np.zeros(self.num_blocks, np.int32)
        self._free: list[int] = list(range(self.num_blocks - 1, 0, -1))
        self._cached: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * self.num_blocks
        # LRU with lazy deletion: an entry counts only while it carries its block's stamp.
        self._lru: deque[tuple[int, int]] = deque()
        self._stamp_of = [0] * self.num_blocks
        self._stamp = 0
        self._num_evictable = 0
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
        limit = (digest.num_tokens - 1) // self.block_size
        blocks: list[int] = []
        for key in digest.hashes[:limit]:
            block = self._cached.get(key)
            if block is None:
                break
            blocks.append(block)
        return Match(len(blocks) * self.block_size, blocks) if blocks else NO_MATCH

    def admit(self, slot: int, digest: Any, match: Match, total: int) -> Sequence[BlockCopy] | None:
        shared: list[int] = match.handle or []
        needed = -(-total // self.block_size) - len(shared)
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if needed > self.num_available - revived:
            return None
        for block in shared:
            self._take_shared(block)
        blocks = shared + self._allocate_many(needed)
        self._table[slot, : len(blocks)] = blocks
        self.num_slot_blocks[slot] = len(blocks)
        self._published[slot] = len(shared)
        # The slot's own copy: it grows with the output.
        self._digests[slot] = Digest(digest.num_tokens, digest.root, list(digest.hashes))
        if self.prefix_caching:
            self._queries += digest.num_tokens
            self._hits += match.num_tokens
        return ()

    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        have = self.num_slot_blocks[slots]
        short = np.flatnonzero(totals > have * self.block_size)
        if not short.size:
            return len(slots)
        held = have[short]
        needed = -(-totals[short] // self.block_size) - held
        fitting = int(np.searchsorted(np.cumsum(needed), self.num_available, side="right"))
        self._append(slots[short[:fitting]], held[:fitting], needed[:fitting])
        return len(slots) if fitting == len(short) else int(short[fitting])

    def _append(
        self, slots: NDArray[np.intp], held: NDArray[np.int32], needed: NDArray[np.int64]
    ) -> None:
        """Give `needed[i]` new blocks to `slots[i]`, which holds `held[i]`."""
        blocks = self._allocate_many(int(needed.sum()))
        if len(blocks) == len(slots):  # one each, as in decoding
            self._table[slots, held] = blocks
        else:
            rows = np.repeat(np.arange(len(slots)), needed)
            offsets = np.arange(len(blocks)) - (np.cumsum(needed) - needed)[rows]
            self._table[slots[rows], held[rows] + offsets] = blocks
        self.num_slot_blocks[slots] += needed.astype(np.int32)

    # ---- publication and release ----------------------------------------------------------------

    def commit(
        self, slots: NDArray[np.intp], totals: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        if not self.prefix_caching:
            return
        full = totals // self.block_size
        published = self._published[slots]
        rows = np.flatnonzero(full > published)
        if not rows.size:
            return
        slots, first, last = slots[rows], published[rows], full[rows]
        self._published[slots] = last
        one = last - first == 1
        if one.all():
            self._publish_one_each(slots, first, tokens)
            return
        for slot, begin, end in zip(slots.tolist(), first.tolist(), last.tolist(), strict=True):
            digest = self._digests[slot]
            if len(digest.hashes) < end:
                self._hash_blocks(digest, tokens[slot], end)
            self._name(digest.hashes[begin:end], self._table[slot, begin:end].tolist())

    def _publish_one_each(
        self, slots: NDArray[np.intp], first: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> None:
        """The block with index `first[i]` of each slot is full: the usual case in decoding."""
        size = self.block_size
        columns = first[:, None] * size + np.arange(size)
        data = tokens[slots[:, None], columns].astype("<i4", copy=False).tobytes()
        blocks = self._table[slots, first].tolist()
        keys = []
        for row, (slot, index) in enumerate(zip(slots.tolist(), first.tolist(), strict=True)):
            digest = self._digests[slot]
            hashes = digest.hashes
            if len(hashes) <= index:
                parent = hashes[-1] if hashes else digest.root
                hashes.append(sha256(parent + data[4 * size * row : 4 * size * (row + 1)]).digest())
            keys.append(hashes[index])
        self._name(keys, blocks)

    def _name(self, keys: list[bytes], blocks: list[int]) -> None:
        """Make blocks known by their hashes, those that are not known already."""
        cached, hash_of = self._cached, self._hash_of
        for key, block in zip(keys, blocks, strict=True):
            if key not in cached:
                cached[key] = block
                hash_of[block] = key

    def truncate(self, slot: int, total: int) -> None:
        keep = -(-total // self.block_size)
        self._drop(slot, keep)
        full = total // self.block_size
        self._published[slot] = min(int(self._published[slot]), full)
        del self._digests[slot].hashes[full:]

    def release(self, slot: int) -> None:
        self._drop(slot, 0)
        self._published[slot] = 0
        self._digests[slot] = _EMPTY

    def _drop(self, slot: int, keep: int) -> None:
        """Give back the slot's blocks from index `keep` on, the last one first."""
        held = int(self.num_slot_blocks[slot])
        if held <= keep:
            return
        blocks = self._table[slot, keep:held][::-1].copy()
        self._table[slot, keep:held] = 0
        self.num_slot_blocks[slot] = keep
        self._refs[blocks] -= 1
        for block in blocks[self._refs[blocks] == 0].tolist():
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._retire(block)

    # ---- forks ----------------------------------------------------------------------------------

    def fork(self, parent: int, child: int, total: int) -> Sequence[BlockCopy] | None:
        if self.num_available < 1:
            return None
        full, partial = divmod(total, self.block_size)
        shared = self._table[parent, :full]
        self._refs[shared] += 1
        (own,) = self._allocate_many(1)
        self._table[child, :full] = shared
        self._table[child, full] = own
        self.num_slot_blocks[child] = full + 1
        origin = self._digests[parent]
        self._digests[child] = Digest(total, origin.root, origin.hashes[:full])
        self._published[child] = min(int(self._published[parent]), full)
        if self.prefix_caching:
            self._queries += total + 1
            self._hits += total
        if not partial:
            return ()
        source = int(self._table[parent, full])
        return [BlockCopy(group, source, own, partial) for group in self._groups]

    # ---- blocks ---------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self._num_evictable

    def _allocate_many(self, count: int) -> list[int]:
        """New blocks with one user each; the caller has checked that there are enough."""
        free = self._free
        taken = min(count, len(free))
        blocks = free[len(free) - taken :][::-1]
        del free[len(free) - taken :]
        blocks += [self._evict() for _ in range(count - taken)]
        self._refs[blocks] = 1
        return blocks

    def _take_shared(self, block: int) -> None:
        if self._refs[block] == 0:
            self._stamp_of[block] = 0
            self._num_evictable -= 1
        self._refs[block] += 1

    def _retire(self, block: int) -> None:
        """The block lost its last user and keeps its content."""
        self._stamp += 1
        self._stamp_of[block] = self._stamp
        self._lru.append((block, self._stamp))
        self._num_evictable += 1
        if len(self._lru) > 2 * self._num_evictable + 1024:
            self._lru = deque(e for e in self._lru if self._stamp_of[e[0]] == e[1])

    def _evict(self) -> int:
        """The least recently used block without user; its content is forgotten."""
        while True:
            block, stamp = self._lru.popleft()
            if self._stamp_of[block] == stamp:
                break
        self._stamp_of[block] = 0
        self._num_evictable -= 1
        self._forget(block)
        return block

    def _forget(self, block: int) -> None:
        key = self._hash_of[block]
        assert key is not None, f"block {block} on the LRU list has no hash"
        del self._cached[key]
        self._hash_of[block] = None

    # ---- inspection -----------------------------------------------------------------------------

    def fits(self, total: int) -> int | None:
        most = min(self.num_blocks - 1, self._max_blocks) * self.block_size
        return None if total <= most else most

    def stats(self) -> KVStats:
        return KVStats(
            self.num_blocks - 1, len(self._free), self._num_evictable, self._queries, self._hits
        )

    def reset_prefix_cache(self) -> bool:
        if self.num_available < self.num_blocks - 1:
            return False
        while self._num_evictable:
            self._free.append(self._evict())
        self._lru.clear()
        return True

    def check(self) -> None:
        refs = np.zeros(self.num_blocks, np.int64)
        for slot in range(len(self._table)):
            held = int(self.num_slot_blocks[slot])
            np.add.at(refs, self._table[slot, :held], 1)
            assert not self._table[slot, held:].any(), f"slot {slot}: entries past its blocks"
        assert refs[0] == 0, "the null block was handed out"
        assert (refs == self._refs).all(), "reference counts differ from block tables"
        free = set(self._free)
        evictable = {block for block, stamp in self._lru if self._stamp_of[block] == stamp}
        used = set(np.flatnonzero(refs).tolist())
        assert len(free) == len(self._free), "a block is free twice"
        assert len(evictable) == self._num_evictable, "evictable blocks are miscounted"
        states = len(free) + len(evictable) + len(used)
        assert states == len(free | evictable | used), "a block is in two states"
        assert free | evictable | used == set(range(1, self.num_blocks)), "blocks were lost"
        for key, block in self._cached.items():
            assert self._hash_of[block] == key, f"block {block}: hash and table disagree"
            assert block not in free, f"block {block} is free and published"
