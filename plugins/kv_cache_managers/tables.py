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
from octavo.core.errors import CapacityError
from octavo.plugins.kv_cache_managers.host_pool import SwappedSequence, SwapPool


class FreeBlocks:
    """A stack of the numbers of blocks without content."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)
        self._count = num_blocks - 1

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> NDArray[np.int32]:
        """The `count` blocks given back last, the last one first."""
        end = self._count
        self._count = end - count
        return self._stack[self._count : end][::-1].copy()

    def give(self, blocks: Sequence[int]) -> None:
        """These have no content any more."""
        end = self._count
        self._count = end + len(blocks)
        self._stack[end : self._count] = blocks

    def blocks(self) -> NDArray[np.int32]:
        """All of them."""
        return self._stack[: self._count].copy()


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
        self._free = FreeBlocks(self.num_blocks)
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

    def _allocate_many(self, count: int) -> NDArray[np.int32]:
        """New blocks with one user each; the caller has checked that there are enough."""
        taken = min(count, len(self._free))
        blocks = self._free.take(taken)
        if taken < count:
            evicted = np.asarray(self._evict(count - taken), np.int32)
            blocks = np.concatenate([blocks, evicted])
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

    def _fill_table(self, slot: int, shared: Sequence[int], own: NDArray[np.int32]) -> None:
        """Fill the empty slot's table: blocks shared with others, then its own."""
        begin, end = len(shared), len(shared) + len(own)
        if begin:
            self._table[slot, :begin] = shared
        self._table[slot, begin:end] = own
        self.num_slot_blocks[slot] = end

    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        held = self.num_slot_blocks[slots]
        needed = (totals + (self.block_size - 1)) // self.block_size - held
        short = (needed > 0).nonzero()[0]
        if len(short) < len(slots):
            slots, held, needed = slots[short], held[short], needed[short]
        fitting, wanted = len(short), int(needed.sum())
        if wanted > self.num_available:
            fitting = int(np.searchsorted(np.cumsum(needed), self.num_available, side="right"))
            slots, held, needed = slots[:fitting], held[:fitting], needed[:fitting]
            wanted = int(needed.sum())
        if wanted:
            self._append(slots, held, needed, wanted)
        return len(totals) if fitting == len(short) else int(short[fitting])

    def _append(
        self,
        slots: NDArray[np.intp],
        held: NDArray[np.int32],
        needed: NDArray[np.int64],
        wanted: int,
    ) -> None:
        """Give `needed[i]` new blocks, `wanted` in all, to `slots[i]`, which holds `held[i]`."""
        blocks = self._allocate_many(wanted)
        if wanted == len(slots):  # one each, as in decoding
            self._table[slots, held] = blocks
        else:
            rows = np.repeat(np.arange(len(slots)), needed)
            offsets = np.arange(wanted) - (np.cumsum(needed) - needed)[rows]
            self._table[slots[rows], held[rows] + offsets] = blocks
        self.num_slot_blocks[slots] = held + needed

    def truncate(self, slot: int, total: int) -> None:
        size = self.block_size
        keep, (index, written) = -(-total // size), divmod(total, size)
        held = int(self.num_slot_blocks[slot])
        if written and index < held and self._is_known(slot, index):
            # It will be written into: others keep the block, and the slot gets a copy.
            freed = np.count_nonzero(self._refs[self._table[slot, keep:held]] == 1)
            if self.num_available + freed < 1:
                raise CapacityError(
                    f"slot {slot} cannot be cut to {total} tokens: they end in a block that others"
                    " need, and none is free for a copy"
                )
            self._drop(slot, keep)
            source = int(self._table[slot, index])
            (own,) = self._allocate_many(1).tolist()
            self._table[slot, index] = own
            self._copy([(source, own, written)], CopyKind.DEVICE)
            self._lose_user(np.asarray([source], np.int32))
        self._drop(slot, keep)

    def _is_known(self, slot: int, index: int) -> bool:
        """Whether somebody else uses the slot's block, or may find its content."""
        return bool(self._refs[self._table[slot, index]] > 1)

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
        self._lose_user(blocks)

    def _lose_user(self, blocks: NDArray[np.int32]) -> None:
        """One user less for each of these blocks."""
        users = self._refs[blocks] - 1
        self._refs[blocks] = users
        self._retire((blocks[users == 0] if users.any() else blocks).tolist())

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

    def _shared_on_return(self, swapped: SwappedSequence) -> list[int]:
        """Leading blocks of a swapped sequence whose content is still on the device."""
        return []

    def _take_shared(self, blocks: list[int]) -> None:
        """One user more for each."""
        self._refs[blocks] += 1

    def _swapped_in(self, slot: int, swapped: SwappedSequence, num_shared: int) -> None:
        """The slot has its blocks, the first `num_shared` of them shared."""

    def swap_in(self, slot: int, handle: Any, total: int) -> Sequence[BlockCopy] | None:
        swapped: SwappedSequence = handle
        shared = self._shared_on_return(swapped)
        needed = -(-total // self.block_size) - len(shared)
        revived = sum(1 for block in shared if self._refs[block] == 0)
        if needed > self.num_available - revived:
            return None
        self._take_shared(shared)
        own = self._allocate_many(needed)
        self._fill_table(slot, shared, own)
        begin, size = len(shared), self.block_size
        sources = swapped.blocks[begin:]
        targets = own[: len(sources)].tolist()
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
        states[self._free.blocks()] = BlockState.FREE
        return states[1:]

    def check(self) -> None:
        refs = np.zeros(self.num_blocks, np.int64)
        for slot in range(len(self._table)):
            held = int(self.num_slot_blocks[slot])
            np.add.at(refs, self._table[slot, :held], 1)
            assert not self._table[slot, held:].any(), f"slot {slot}: entries past its blocks"
        assert refs[0] == 0, "the null block was handed out"
        assert (refs == self._refs).all(), "reference counts differ from block tables"
        free = set(self._free.blocks().tolist())
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
