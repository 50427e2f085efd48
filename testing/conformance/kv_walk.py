"""A random walk over a KV cache manager, beside a model of the pool that it deals blocks of.

The model stores token ids: every token is written where the block table says, the copies that the
manager asks for are run, and after every move each sequence is read back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import BlockCopy, BlockState, CopyKind, KVCacheManager

SLOTS, LENGTH, SIZE = 5, 40, 4


class KVWalk:
    """kv: for SLOTS sequences of LENGTH tokens in blocks of SIZE. host_blocks: swap and cache."""

    def __init__(
        self, kv: KVCacheManager, num_blocks: int, host_blocks: int, groups: int, seed: int
    ) -> None:
        self.kv, self.groups = kv, groups
        self.random = np.random.default_rng(seed)
        self.pool = np.full((groups, num_blocks, SIZE), -1, np.int64)
        self.host = np.full((groups, max(host_blocks, 1), SIZE), -1, np.int64)
        self.tokens = np.zeros((SLOTS, LENGTH), np.int32)
        self.salts: dict[int, list[bytes]] = {}
        self.lengths: dict[int, int] = {}
        self.swapped: list[tuple[Any, NDArray[np.int32], list[bytes]]] = []
        self.num_moves = dict.fromkeys(("admit", "fork", "extend", "swap_out", "swap_in"), 0)

    def run(self, moves: int) -> None:
        """Random moves, each checked; at the end everything is given back."""
        steps = [
            *[self.admit] * 4,
            *[self.extend] * 4,
            *[self.release] * 2,
            self.extend_several,
            self.speculate,
            self.fork,
            self.swap_out,
            self.swap_in,
            self.swap_drop,
            self.reset_in_use,
        ]
        for move in range(moves):
            steps[self.random.integers(len(steps))]()
            if move % 3 == 0:
                self.kv.catch_up()
            self.check()
        self.finish()

    # ---- moves ------------------------------------------------------------------------------

    def admit(self) -> None:
        slot = self._free_slot()
        if slot is None:
            return
        prompt = self.random.integers(0, 2, self.random.integers(1, 24)).astype(np.int32)
        salt = [b"salt"] if self.random.random() < 0.25 else []
        self.admit_prompt(slot, prompt, salt)

    def admit_prompt(self, slot: int, prompt: NDArray[np.int32], salt: list[bytes]) -> int | None:
        """Admit and compute a prompt; tokens found, or None when it did not fit."""
        digest = self.kv.digest(prompt, salt)
        match = self.kv.lookup(digest, prompt)
        assert 0 <= match.num_tokens < len(prompt), (
            f"lookup found {match.num_tokens} of {len(prompt)} tokens: one is always recomputed"
        )
        before, tables = self.kv.stats(), self.kv.block_tables.copy()
        copies = self.kv.admit(slot, digest, match, len(prompt))
        if copies is None:
            assert self.kv.stats() == before, "an admit that fails has changed the counts"
            assert (self.kv.block_tables == tables).all(), "an admit that fails changed a table"
            needed = self._blocks_for(len(prompt))
            room = before.num_free + before.num_evictable
            assert needed > room - match.num_tokens // SIZE, (
                f"admit refused {needed} blocks though {room} are free or evictable"
            )
            return None
        assert self.kv.num_slot_blocks[slot] == self._blocks_for(len(prompt)), (
            f"{self.kv.num_slot_blocks[slot]} blocks for {len(prompt)} tokens of {SIZE}"
        )
        self.tokens[slot, : len(prompt)] = prompt
        self._seat(slot, len(prompt), salt)
        self._copy(copies)
        self._write(slot, match.num_tokens)
        self.num_moves["admit"] += 1
        return match.num_tokens

    def extend(self) -> None:
        slot = self._slot()
        if slot is not None:
            self._grow([slot], [int(self.random.integers(1, 9))])

    def extend_several(self) -> None:
        slots = self.random.permutation(sorted(self.lengths)).tolist()
        self._grow(slots, self.random.integers(1, 6, len(slots)).tolist())

    def _grow(self, slots: list[int], more: list[int]) -> None:
        if not slots:
            return
        totals = [min(self.lengths[s] + m, LENGTH) for s, m in zip(slots, more, strict=True)]
        held = [int(self.kv.num_slot_blocks[s]) for s in slots]
        room = self.kv.stats().num_free + self.kv.stats().num_evictable
        fit = self.kv.extend(np.asarray(slots, np.intp), np.asarray(totals, np.int64))
        assert 0 <= fit <= len(slots), f"extend says {fit} of {len(slots)} fit"
        self._copy(self.kv.take_copies())
        missing = [self._blocks_for(t) - h for t, h in zip(totals, held, strict=True)]
        if fit < len(slots):
            assert sum(missing[: fit + 1]) > room, (
                f"extend stopped at the {fit}th of {len(slots)} though {room} blocks were to be had"
            )
        for slot, total in zip(slots[:fit], totals, strict=False):
            assert self.kv.num_slot_blocks[slot] >= self._blocks_for(total), (
                f"extend said that {total} tokens of slot {slot} fit, into "
                f"{self.kv.num_slot_blocks[slot]} blocks of {SIZE}"
            )
            start = self.lengths[slot]
            self.tokens[slot, start:total] = self.random.integers(0, 2, total - start)
            self.lengths[slot] = total
            self._write(slot, start)
        for slot, blocks in zip(slots[fit:], held[fit:], strict=True):
            assert self.kv.num_slot_blocks[slot] == blocks, "a slot that did not fit got blocks"
        self.num_moves["extend"] += fit

    def speculate(self) -> None:
        """Room for several tokens, of which none is kept."""
        slot = self._slot()
        if slot is None:
            return
        length = self.lengths[slot]
        total = min(length + int(self.random.integers(1, 9)), LENGTH)
        if self.kv.extend(np.asarray([slot], np.intp), np.asarray([total], np.int64)):
            self._copy(self.kv.take_copies())
            for position in range(length, total):  # what the rejected tokens wrote
                block = self.kv.block_tables[:, slot, position // SIZE]
                self.pool[np.arange(self.groups), block, position % SIZE] = 99
            self.cut(slot, length)
            assert self.kv.num_slot_blocks[slot] == self._blocks_for(length), (
                f"truncate to {length} tokens left {self.kv.num_slot_blocks[slot]} blocks"
            )
        else:
            self._copy(self.kv.take_copies())

    def cut(self, slot: int, total: int) -> None:
        """Drop what lies beyond `total` tokens; there is room for a copy of the block."""
        self.kv.truncate(slot, total)
        self._copy(self.kv.take_copies())
        self.lengths[slot] = total

    def grow(self, slot: int, more: int) -> None:
        """Compute `more` tokens behind those of a slot, not the same as before."""
        self._grow([slot], [more])

    def fork(self) -> None:
        parent, child = self._slot(), self._free_slot()
        if parent is None or child is None:
            return
        total = int(self.random.integers(0, self.lengths[parent]))
        before = self.kv.stats()
        copies = self.kv.fork(parent, child, total)
        if copies is None:
            assert not self.kv.num_slot_blocks[child], "a fork that fails left blocks"
            assert self.kv.stats() == before, "a fork that fails has changed the counts"
            return
        self._copy(copies)
        self.tokens[child, : total + 1] = self.tokens[parent, : total + 1]
        self._seat(child, total + 1, self.salts[parent])
        self._write(child, total)
        self.num_moves["fork"] += 1

    def release(self) -> None:
        slot = self._slot()
        if slot is None:
            return
        self.kv.release(slot)
        del self.lengths[slot]
        before = self.kv.stats()
        self.kv.release(slot)
        assert self.kv.stats() == before, "releasing an empty slot changes the counts"

    def swap_out(self) -> None:
        slot = self._slot()
        if slot is None:
            return
        length, before = self.lengths[slot], self.kv.stats()
        out = self.kv.swap_out(slot, length)
        if out is None:
            assert self.kv.stats() == before, "a swap_out that fails has changed the counts"
            return
        self._copy(out.copies)
        assert not self.kv.num_slot_blocks[slot], "a swapped slot still has blocks"
        self.swapped.append((out.handle, self.tokens[slot, :length].copy(), self.salts[slot]))
        del self.lengths[slot]
        self.num_moves["swap_out"] += 1

    def swap_in(self) -> None:
        slot = self._free_slot()
        if slot is None or not self.swapped:
            return
        index = int(self.random.integers(len(self.swapped)))
        handle, tokens, salt = self.swapped[index]
        total = min(len(tokens) + int(self.random.integers(0, 6)), LENGTH)
        before = self.kv.stats()
        copies = self.kv.swap_in(slot, handle, total)
        if copies is None:
            assert self.kv.stats() == before, "a swap_in that fails has changed the counts"
            return
        del self.swapped[index]
        self._copy(copies)
        self.tokens[slot, : len(tokens)] = tokens
        self.tokens[slot, len(tokens) : total] = 1
        self._seat(slot, total, salt)
        self._write(slot, len(tokens))
        self.num_moves["swap_in"] += 1

    def swap_drop(self) -> None:
        if self.swapped and self.random.random() < 0.5:
            self.kv.swap_drop(self.swapped.pop()[0])

    def reset_in_use(self) -> None:
        """A reset while blocks are in use forgets everything or nothing."""
        if self.random.random() < 0.8:
            return
        before = self.kv.stats().num_evictable
        done = self.kv.reset_prefix_cache()
        left = self.kv.stats().num_evictable
        assert left == (0 if done else before), (
            f"reset_prefix_cache gave {done}: of {before} evictable blocks {left} are left"
        )

    def finish(self) -> None:
        """Give everything back: every block is free or evictable, and a reset frees them all."""
        for slot in sorted(self.lengths):
            self.kv.release(slot)
        self.lengths.clear()
        for handle, _, _ in self.swapped:
            self.kv.swap_drop(handle)
        self.swapped.clear()
        stats = self.kv.stats()
        assert stats.num_free + stats.num_evictable == stats.num_blocks, (
            f"after everything was released {stats.num_free} blocks are free and "
            f"{stats.num_evictable} evictable, of {stats.num_blocks}"
        )
        assert stats.num_free_swap_blocks == stats.num_swap_blocks, "host blocks leaked"
        assert self.kv.reset_prefix_cache(), "the cache cannot be reset though nothing is in use"
        assert self.kv.stats().num_free == stats.num_blocks, "a reset did not free every block"
        self.check()

    # ---- the model --------------------------------------------------------------------------

    def check(self) -> None:
        """Tables and counts agree with the rules, and every sequence reads its own tokens."""
        self.kv.check()
        stats = self.kv.stats()
        used: list[set[int]] = [set() for _ in range(self.groups)]
        for slot in range(SLOTS):
            count = int(self.kv.num_slot_blocks[slot])
            table = self.kv.block_tables[:, slot]
            assert not table[:, count:].any(), f"slot {slot}: entries beyond {count} are not 0"
            assert (table[:, :count] > 0).all(), f"slot {slot}: the null block was handed out"
            if slot not in self.lengths:
                assert count == 0, f"slot {slot} is empty and has {count} blocks"
            for group in range(self.groups):
                own = table[group, :count].tolist()
                assert len(set(own)) == count, f"slot {slot}: one block twice: {own}"
                used[group] |= set(own)
        in_use = stats.num_blocks - stats.num_free - stats.num_evictable
        for blocks in used:
            assert in_use == len(blocks), (
                f"the statistics say {in_use} blocks are in use, the tables name {len(blocks)}"
            )
        for slot, length in self.lengths.items():
            for group in range(self.groups):
                read = self.pool[group, self._table(slot)[group]].reshape(-1)[:length]
                wrote = self.tokens[slot, :length]
                assert (read == wrote).all(), (
                    f"slot {slot}: its blocks hold the KV of tokens {read.tolist()}, expected "
                    f"{wrote.tolist()}"
                )

        self._check_states()

    def _check_states(self) -> None:
        """What `block_states` tells, if it does, is what tables and statistics say."""
        states = self.kv.block_states()
        if states is None:
            return
        stats = self.kv.stats()
        held = np.concatenate([self._table(slot)[0] for slot in range(SLOTS)])
        users = np.bincount(held, minlength=stats.num_blocks + 1)[1:]
        for state, blocks in (
            (BlockState.USED, users == 1),
            (BlockState.SHARED, users > 1),
        ):
            told, true = np.flatnonzero(states == state) + 1, np.flatnonzero(blocks) + 1
            assert told.tolist() == true.tolist(), (
                f"block_states says {told.tolist()} are {state.name}, the tables {true.tolist()}"
            )
        counts = np.bincount(states, minlength=len(BlockState))
        assert counts[BlockState.FREE] == stats.num_free, "block_states miscounts free blocks"
        assert counts[BlockState.CACHED] == stats.num_evictable, "it miscounts cached blocks"

    def _table(self, slot: int) -> NDArray[np.int32]:
        return self.kv.block_tables[:, slot, : self.kv.num_slot_blocks[slot]]

    def _write(self, slot: int, start: int) -> None:
        """Compute the KV of a slot's tokens from `start` on, and commit."""
        for position in range(start, self.lengths[slot]):
            for group in range(self.groups):
                block = self.kv.block_tables[group, slot, position // SIZE]
                users = [s for s in self.lengths if block in self._table(s)[group]]
                assert users == [slot], f"slot {slot} writes block {block}, shared by {users}"
                self.pool[group, block, position % SIZE] = self.tokens[slot, position]
        self.kv.commit(
            np.asarray([slot], np.intp), np.asarray([self.lengths[slot]], np.int64), self.tokens
        )

    def _copy(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            reads = self.host if copy.kind == CopyKind.TO_DEVICE else self.pool
            writes = self.host if copy.kind == CopyKind.TO_HOST else self.pool
            values = reads[copy.group, copy.source, : copy.num_tokens].copy()
            assert (values >= 0).all(), f"{copy} reads what was never written"
            writes[copy.group, copy.target] = -1
            writes[copy.group, copy.target, : copy.num_tokens] = values

    def _seat(self, slot: int, length: int, salt: list[bytes]) -> None:
        self.lengths[slot], self.salts[slot] = length, salt

    def _slot(self) -> int | None:
        slots = sorted(self.lengths)
        return slots[int(self.random.integers(len(slots)))] if slots else None

    def _free_slot(self) -> int | None:
        free = sorted(set(range(SLOTS)) - set(self.lengths))
        return free[int(self.random.integers(len(free)))] if free else None

    @staticmethod
    def _blocks_for(tokens: int) -> int:
        return -(-tokens // SIZE)
