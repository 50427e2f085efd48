"""Which block holds which content, by hash: what prefix lookups find."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.contracts.eviction_policy import EvictionPolicy


class PrefixIndex:
    """Maps hashes to blocks. Of several blocks with the same content the first one counts."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy) -> None:
        self.block_of: dict[bytes, int] = {}
        """Block by hash."""
        self.hash_of: list[bytes | None] = [None] * num_blocks
        """The hash under which each block can be found; None if it cannot."""
        self.follows_chains = type(eviction).link is not EvictionPolicy.link
        self._link = eviction.link

    def put(self, key: bytes, block: int, before: bytes | None) -> None:
        """Register a block. before: the hash of the block that it continues."""
        block_of = self.block_of
        if key not in block_of:
            block_of[key] = block
            self.hash_of[block] = key
            if self.follows_chains:
                self._link(block, 0 if before is None else block_of.get(before, 0))

    def put_run(self, keys: Sequence[bytes], blocks: Sequence[int], before: bytes | None) -> None:
        """Register consecutive blocks of one sequence. before: the hash of the block that the
        first one continues."""
        block_of, hash_of = self.block_of, self.hash_of
        if self.follows_chains or not block_of.keys().isdisjoint(keys):
            for key, block in zip(keys, blocks, strict=True):
                self.put(key, block, before)
                before = key
            return
        block_of.update(zip(keys, blocks, strict=True))
        for key, block in zip(keys, blocks, strict=True):
            hash_of[block] = key

    def forget(self, block: int) -> bytes:
        """Unregister a block; return the hash that it had."""
        key = self.hash_of[block]
        assert key is not None, f"block {block} is evictable and has no content"
        del self.block_of[key]
        self.hash_of[block] = None
        return key
