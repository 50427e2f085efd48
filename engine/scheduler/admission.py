"""Admission: waiting sequences get slots while slots, tokens and blocks last."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest
from octavo.core.errors import ReturnedWrong
from octavo.core.messages import AdmittedRow
from octavo.engine.scheduler.kv_cache import KVCache
from octavo.engine.scheduler.state import SequenceState, SlotTable
from octavo.engine.scheduler.step import SchedulerLimits


class Claim(NamedTuple):
    """A running sequence that must give way to a waiting one."""

    victim: int
    """The running sequence's slot."""
    by: int
    """Handle of the waiting sequence."""
    lacks: str
    """What that lacks: `slot` or `blocks`."""


class Admission:
    """Gives slots to waiting sequences, in the policy's order. sequences: all live ones, by
    handle."""

    def __init__(
        self,
        limits: SchedulerLimits,
        slots: SlotTable,
        cache: KVCache,
        policy: SchedulerPolicy,
        sequences: Mapping[int, SequenceState],
    ) -> None:
        self._limits, self._slots, self._cache = limits, slots, cache
        self._policy, self._sequences = policy, sequences
        self.may_preempt = type(policy).preempts is not SchedulerPolicy.preempts
        # (waiting handle, versions of the row sets) for which the policy said that it waits.
        self._waits: tuple[int, int, int] | None = None

    # ---- preemption for a waiting request -----------------------------------------------------

    def find_victim(self) -> Claim | None:
        """Ask the policy whether a running sequence must give way to the next waiting request,
        which lacks a slot or blocks."""
        slots = self._slots
        if not slots.num_running:
            return None
        waiting = self._peek()
        if waiting is None or not self._is_short(waiting):
            return None
        state = (waiting.handle, slots.decoding.version, slots.prefilling.version)
        if state == self._waits:
            return None
        victim = self._policy.preempts(waiting, slots.view(slots.running))
        if victim is None:
            self._waits = state
            return None
        return Claim(victim, waiting.handle, "blocks" if slots.num_free else "slot")

    def _peek(self) -> WaitingRequest | None:
        waiting = self._policy.peek()
        if waiting is None or (
            isinstance(waiting, WaitingRequest) and waiting.handle in self._sequences
        ):
            return waiting
        raise ReturnedWrong(self._policy, "peek", waiting, "a request that waits, or None")

    def _is_short(self, waiting: WaitingRequest) -> bool:
        """Whether this request finds no slot, or fewer blocks than it needs."""
        if not self._slots.num_free:
            return True
        room = self._cache.num_available() * self._limits.block_size
        if room >= waiting.num_tokens:
            return False
        match = self._cache.match(self._sequences[waiting.handle])
        return room < waiting.num_tokens - match.num_tokens

    # ---- admission ----------------------------------------------------------------------------

    def admit(
        self, budget: int, chunks: NDArray[np.int64] | None
    ) -> tuple[list[AdmittedRow], NDArray[np.int64] | None]:
        """Admit what fits into `budget` tokens.

        Returns the rows for the plan, and `chunks` with the tokens of the newly admitted rows
        appended (None still when there is no prefilling row).
        """
        slots = self._slots
        if budget <= 0 or not len(self._policy) or not slots.num_free:
            return [], chunks
        admitted: list[AdmittedRow] = []
        sizes: list[int] = []
        while budget > 0 and slots.num_free:
            waiting = self._peek()
            if waiting is None:
                break
            sequence = self._sequences[waiting.handle]
            chunk = self._place(sequence, budget, len(admitted))
            if not chunk:
                break
            popped = self._policy.pop()
            if getattr(popped, "handle", None) != waiting.handle:
                expected = f"the request that peek gave, {waiting!r:.80}"
                raise ReturnedWrong(self._policy, "pop", popped, expected)
            budget -= chunk
            sizes.append(chunk)
            admitted.append(self._describe(sequence))
        if not admitted:
            return [], chunks
        slots.start_prefilling([row.slot for row in admitted])
        new = np.asarray(sizes, np.int64)
        return admitted, new if chunks is None else np.concatenate([chunks, new])

    def _place(self, sequence: SequenceState, budget: int, num_admitted: int) -> int:
        """Give a sequence a slot and blocks; the tokens of its first chunk, or 0 when it does not
        fit now. num_admitted: how many were admitted before it in this step."""
        parent = self._fork_parent(sequence)
        if parent is not None:
            return self._place_fork(sequence, parent)
        cache, slots, total = self._cache, self._slots, len(sequence.known)
        swapped = sequence.swapped
        match = cache.match(sequence)
        cached = match.num_tokens if swapped is None else sequence.waiting.num_computed
        others = slots.num_running + num_admitted
        chunk = self._first_chunk(sequence, total - cached, budget, others)
        if chunk <= 0 or not self._has_headroom(sequence, total - match.num_tokens, others):
            return 0
        # Blocks for the whole prompt at once: a prompt that was begun never waits half-way.
        slot = slots.next_free
        if swapped is not None:
            fits = cache.swap_in(slot, swapped, total)
        else:
            fits = cache.admit(sequence, slot, match, total)
        if not fits:
            return 0
        slots.occupy(sequence, cached, int(cache.manager.num_slot_blocks[slot]))
        return chunk

    def _first_chunk(self, sequence: SequenceState, want: int, budget: int, others: int) -> int:
        """How many of the `want` tokens that are to be computed the first step computes. others:
        sequences that run beside this one."""
        limits = self._limits
        if limits.max_chunk_tokens is not None and limits.chunked_prefill:
            want = min(want, limits.max_chunk_tokens)
        if not limits.chunked_prefill:
            # A preempted sequence may have outgrown a whole step: that one is computed in chunks.
            return 0 if budget < want <= limits.max_num_batched_tokens else min(want, budget)
        chunk = min(want, budget)
        cap = self._policy.admit_cap(sequence.waiting, chunk)
        if not isinstance(cap, Integral):
            raise ReturnedWrong(self._policy, "admit_cap", cap, "an integer")
        return min(chunk, max(int(cap), 0 if others else 1))  # a step computes something

    def _has_headroom(self, sequence: SequenceState, num_tokens: int, others: int) -> bool:
        """Whether there are blocks for `num_tokens` tokens. A preempted sequence comes back only
        when the `others` can each take one more, so that it is not preempted again at once."""
        if not sequence.num_preemptions or not others:
            return True
        free = self._cache.num_available() - others
        return free * self._limits.block_size >= num_tokens

    def _fork_parent(self, sequence: SequenceState) -> SequenceState | None:
        """The running sequence whose prompt this one can share, if its KV is there."""
        request = sequence.request
        if request.parent is None or sequence.swapped is not None:
            return None
        if len(sequence.known) != sequence.num_prompt:
            return None
        parent = self._sequences.get(request.parent)
        if parent is None or parent.slot < 0 or sequence.num_prompt < 2:
            return None
        if int(self._slots.num_computed[parent.slot]) < sequence.num_prompt:
            return None
        return parent

    def _place_fork(self, sequence: SequenceState, parent: SequenceState) -> int:
        cache, slot = self._cache, self._slots.next_free
        shared = sequence.num_prompt - 1  # it computes the prompt's last token itself, to sample
        if not cache.fork(sequence, parent.slot, slot, shared):
            return 0
        self._slots.occupy(sequence, shared, int(cache.manager.num_slot_blocks[slot]))
        return 1

    def _describe(self, sequence: SequenceState) -> AdmittedRow:
        request, slot = sequence.request, sequence.slot
        held = int(self._slots.num_sent_blocks[slot])
        return AdmittedRow(
            slot=slot,
            handle=request.handle,
            token_ids=sequence.known,
            num_prompt=sequence.num_prompt,
            num_computed=int(self._slots.num_computed[slot]),
            blocks=self._cache.manager.block_tables[:, slot, :held].copy(),
            sampling=request.sampling,
            seed=request.seed,
            index=request.index,
            eos_token_ids=request.eos_token_ids,
            adapter=request.adapter,
        )
