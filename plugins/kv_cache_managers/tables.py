"""What KV cache managers over fixed-size blocks have in common: tables, users, growth, swapping.

Every KV group uses the same block numbers: a block id stands for one block in each group's pool.
Legend: S slots, M blocks a slot at most, G groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import (
    BlockCopy,
    BlockState,
    CopyKind,
    KVCacheManager,
    KVCacheManagerContext,
    SwapOut,
)
from octavo.plugins.kv_cache_managers.host_pool import Swapped, SwapPool


class BlockTableManager(KVCacheManager):
    """`_table`: int32[S, M], the same for all groups. `_refs`: int32, slots that use each block.

    A subclass says where new blocks come from (`_evict`), and what becomes of blocks that lost
    their last user (`_retire`); what it keeps beside by slot it forgets in `_forget_slot`.
    """

    uses = frozenset({"swap"})

    def __init__(self, context: KVCacheManagerContext) -> None:
        self.block_size = context.block_size
        self.num_blocks = context.num_blocks
        self._groups = range(context.num_groups)
        self._max_blocks = -(-context.max_model_len // self.block_size)
        # An odd row length: rows a power of two apart would share cache sets.
        row = self._max_blocks | 1
        table = np.zeros((context.max_num_seqs, row), np.int32)
        self._table = table[:, : self._max_blocks]
        self.block_tables = np.broadcast_to(self._table, (context.num_groups, *self._table.shape))
        self.num_slot_blocks = np.zeros(context.max_num_seqs, np.int32)
        self._refs = np.zeros(self.num_blocks, np.int32)
        self._free: list[int] = list(range(self.num_blocks - 1, 0, -1))
        self._swap = SwapPool(context.num_swap_blocks)
        # Copies that no call has returned yet, in order.
        self._copies: list[BlockCopy] = []

    # ---- blocks ---------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._free) + self._num_evictable()

    def _num_evictable(self) -> int:
        """Blocks without a user whose content is kept."""
        return 0

    @abstractmethod
    def _evict(self, count: int) -> list[int]:
        """Take `count` evictable blocks; their content is forgotten."""

    @abstractmethod
    def _retire(self, blocks: list[int]) -> None:
        """These lost their last user, the last of a sequence first: keep or free them."""

    @abstractmethod
    def _forget_slot(self, slot: int) -> None:
        """The slot holds no block any more."""

    def _allocate_many(self, count: int) -> list[int]:
        """New blocks with one user each; the caller has checked that there are enough."""
        free = self._free
        taken = min(count, len(free))
        blocks = free[len(free) - taken :][::-1]
        del free[len(free) - taken :]
        if taken < count:
            blocks += self._evict(count - taken)
        self._refs[blocks] = 1
        return blocks

    def _copy(self, pairs: Iterable[tuple[int, int, int]], kind: CopyKind) -> None:
        """Note copies (source, target, tokens) for every group."""
        for source, target, count in pairs:
            for group in self._groups:
                self._copies.append(BlockCopy(group, source, target, count, kind))

    def take_copies(self) -> Sequence[BlockCopy]:
        if not self._copies:
            return ()
        copies, self._copies = self._copies, []
        return copies

    # ---- growth and release ---------------------------------------------------------------------

    def _seat(self, slot: int, blocks: list[int]) -> None:
        self._table[slot, : len(blocks)] = blocks
        self.num_slot_blocks[slot] = len(blocks)

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

    def truncate(self, slot: int, total: int) -> None:
        self._drop(slot, -(-total // self.block_size))

    def release(self, slot: int) -> None:
        self._drop(slot, 0)
        self._forget_slot(slot)

    def _drop(self, slot: int, keep: int) -> None:
        """Give back the slot's blocks from index `keep` on, the last one first."""
        held = int(self.num_slot_blocks[slot])
        if held <= keep:
            return
        blocks = self._table[slot, keep:held][::-1].copy()
        self._table[slot, keep:held] = 0
        self.num_slot_blocks[slot] = keep
        self._refs[blocks] -= 1
        self._retire(blocks[self._refs[blocks] == 0].tolist())

    def fits(self, total: int) -> int | None:
        most = min(self.num_blocks - 1, self._max_blocks) * self.block_size
        return None if total <= most else most

    # ---- swapping -------------------------------------------------------------------------------

    def swap_out(self, slot: int, num_tokens: int) -> SwapOut | None:
        count = -(-num_tokens // self.block_size)
        swapped = self._swap.put(count, num_tokens, self._swap_state(slot))
        if swapped is None:
            return None
        blocks = self._table[slot, :count].tolist()
        self._copy(self._whole(blocks, swapped.blocks, num_tokens), CopyKind.TO_HOST)
        self.release(slot)
        return SwapOut(swapped, self.take_copies())

    def _whole(
        self, sources: Sequence[int], targets: Sequence[int], num_tokens: int
    ) -> Iterable[tuple[int, int, int]]:
        """Copies of the blocks of `num_tokens` tokens; the last one may be partly filled."""
        size = self.block_size
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            yield source, target, min(size, num_tokens - index * size)

    def _swap_state(self, slot: int) -> Any:
        """What `_swapped_in` needs of a slot that is swapped out."""
        return None

    def _shared_on_return(self, swapped: Swapped) -> list[int]:
        """Leading blocks of a swapped sequence whose content is still on the device."""
        return []

    def _take_shared(self, blocks: list[int]) -> None:
        """One user more for each."""
        self._refs[blocks] += 1

    def _swapped_in(self, slot: int, swapped: Swapped, num_shared: int) -> None:
        """The slot has its blocks, the first `num_shared` of them shared."""

    def swap_in(self, slot: int, handle: Any, total: int) -> Sequence[BlockCopy] | None:
        swapped: Swapped = handle
        shared = self._shared_on_return(swapped)
        needed = -(-total // self.block_size) - len(shared)
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if needed > self.num_available - revived:
            return None
        self._take_shared(shared)
        blocks = shared + self._allocate_many(needed)
        self._seat(slot, blocks)
        begin, size = len(shared), self.block_size
        sources = swapped.blocks[begin:]
        targets = blocks[begin : len(swapped.blocks)]
        rest = swapped.num_tokens - begin * size
        self._copy(self._whole(sources, targets, rest), CopyKind.TO_DEVICE)
        self._swap.drop(swapped)
        self._swapped_in(slot, swapped, begin)
        return self.take_copies()

    def swap_drop(self, handle: Any) -> None:
        self._swap.drop(handle)

    # ---- inspection -----------------------------------------------------------------------------

    def block_states(self) -> NDArray[np.uint8]:
        states = np.minimum(self._refs, BlockState.SHARED).astype(np.uint8)
        states[states == BlockState.FREE] = BlockState.CACHED  # or free, which is known
        states[self._free] = BlockState.FREE
        return states[1:]

    def check(self) -> None:
        refs = np.zeros(self.num_blocks, np.int64)
        for slot in range(len(self._table)):
            held = int(self.num_slot_blocks[slot])
            np.add.at(refs, self._table[slot, :held], 1)
            assert not self._table[slot, held:].any(), f"slot {slot}: entries past its blocks"
        assert refs[0] == 0, "the null block was handed out"
        assert (refs == self._refs).all(), "reference counts differ from block tables"
        free = set(self._free)
        evictable = set(self._evictable())
        used = set(np.flatnonzero(refs).tolist())
        assert len(free) == len(self._free), "a block is free twice"
        assert len(evictable) == self._num_evictable(), "evictable blocks are miscounted"
        states = len(free) + len(evictable) + len(used)
        assert states == len(free | evictable | used), "a block is in two states"
        assert free | evictable | used == set(range(1, self.num_blocks)), "blocks were lost"
        assert not self._copies, "copies were left behind"
        self._swap.check()

    def _evictable(self) -> Iterable[int]:
        """For `check`."""
        return ()
