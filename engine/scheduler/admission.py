"""Admission: waiting sequences get slots while seats, tokens and blocks last."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from numbers import Integral
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import NO_MATCH, Match
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest
from octavo.core.errors import ReturnedWrong
from octavo.core.messages import AdmittedRow
from octavo.engine.scheduler.state import Phase, Sequence

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler


class Admission:
    """The part of the scheduler that seats waiting sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        policy = type(scheduler.policy)
        self.policy_shapes_chunks = (
            policy.cap is not SchedulerPolicy.cap or policy.order is not SchedulerPolicy.order
        )
        self._may_preempt = policy.preempts is not SchedulerPolicy.preempts
        # (waiting handle, versions of the row sets) for which the policy said that it waits.
        self._waits: tuple[int, int, int] | None = None

    def make_way(self) -> bool:
        """Let the policy preempt for the next waiting request, where that lacks a seat or blocks.
        False when that must wait for a step in flight: the victim's last token is not known yet.

        Nothing is done while a step in flight is about to free some.
        """
        scheduler = self._s
        if not self._may_preempt or not len(scheduler.policy):
            return True
        if any(record.ending or record.deferred for record in scheduler.in_flight):
            return True
        while scheduler.num_running:
            waiting = self._peek()
            if waiting is None or not self._is_short(waiting):
                return True
            state = (waiting.handle, scheduler.decoding.version, scheduler.prefilling.version)
            if state == self._waits:
                return True
            slots = np.concatenate([scheduler.decoding.slots, scheduler.prefilling.slots])
            view = scheduler.slots.view(slots, scheduler.clock())
            victim = scheduler.policy.preempts(waiting, view)
            if victim is None:
                self._waits = state
                return True
            if scheduler.in_flight:
                return False
            why = "blocks" if scheduler.slots.num_free else "seat"
            scheduler.preemption.preempt(victim, waiting.handle, why)
        return True

    def _peek(self) -> WaitingRequest | None:
        policy = self._s.policy
        waiting = policy.peek()
        if waiting is None or (
            isinstance(waiting, WaitingRequest) and waiting.handle in self._s.sequences
        ):
            return waiting
        raise ReturnedWrong(policy, "peek", waiting, "a request that waits, or None")

    def _is_short(self, waiting: WaitingRequest) -> bool:
        """Whether this request finds no seat, or fewer blocks than it needs."""
        scheduler = self._s
        if not scheduler.slots.num_free:
            return True
        stats, size = scheduler.kv.stats(), scheduler.limits.block_size
        available = stats.num_free + stats.num_evictable
        if available * size >= waiting.num_tokens:
            return False
        sequence = scheduler.sequences[waiting.handle]
        missing = waiting.num_tokens - self.match(sequence).num_tokens
        return available * size < missing

    def admit(
        self, budget: int, chunks: NDArray[np.int64] | None
    ) -> tuple[list[AdmittedRow], NDArray[np.int64] | None]:
        """Seat what fits into `budget` tokens; the copies that this takes are noted.

        Returns the rows for the plan, and `chunks` with the tokens of the newly seated prefilling
        rows appended (None still when there is no prefilling row).
        """
        scheduler = self._s
        if budget <= 0 or not len(scheduler.policy) or not scheduler.slots.num_free:
            return [], chunks
        admitted: list[AdmittedRow] = []
        seated: list[int] = []
        sizes: list[int] = []
        while budget > 0 and scheduler.slots.num_free:
            waiting = self._peek()
            if waiting is None:
                break
            sequence = scheduler.sequences[waiting.handle]
            placed = self._place(sequence, budget, len(seated))
            if placed is None:
                break
            slot, chunk = placed
            popped = scheduler.policy.pop()
            if getattr(popped, "handle", None) != waiting.handle:
                expected = f"the request that peek gave, {waiting!r:.80}"
                raise ReturnedWrong(scheduler.policy, "pop", popped, expected)
            if sequence.swapped is not None:
                scheduler.preemption.came_back(sequence)
            budget -= chunk
            seated.append(slot)
            sizes.append(chunk)
            admitted.append(self._describe(sequence, slot))
        if not seated:
            return [], chunks
        scheduler.prefilling.append(seated)
        new = np.asarray(sizes, np.int64)
        return admitted, new if chunks is None else np.concatenate([chunks, new])

    def _place(self, sequence: Sequence, budget: int, seated: int) -> tuple[int, int] | None:
        """Slot and first chunk for a sequence, or None when it does not fit now. seated: how many
        were seated before it in this step."""
        parent = self._fork_parent(sequence)
        if parent is not None:
            return self._place_fork(sequence, parent)
        scheduler = self._s
        limits, kv = scheduler.limits, scheduler.kv
        total = len(sequence.known)
        swapped = sequence.swapped
        match = self.match(sequence)
        cached = match.num_tokens if swapped is None else sequence.waiting.num_computed
        want = total - cached
        if limits.max_chunk_tokens is not None and limits.chunked_prefill:
            want = min(want, limits.max_chunk_tokens)
        # A preempted sequence may have outgrown a whole step: that one is computed in chunks.
        if budget < want <= limits.max_num_batched_tokens and not limits.chunked_prefill:
            return None
        chunk = min(want, budget)
        others = scheduler.num_running + seated
        if limits.chunked_prefill:
            least = 0 if others else 1  # a step computes something
            cap = scheduler.policy.admit_cap(sequence.waiting, chunk)
            if not isinstance(cap, Integral):
                raise ReturnedWrong(scheduler.policy, "admit_cap", cap, "an integer")
            chunk = min(chunk, max(int(cap), least))
        if chunk <= 0:
            return None
        if not self._has_headroom(sequence, total - match.num_tokens, others):
            return None
        slot = scheduler.slots.take()
        # Blocks for the whole prompt at once: a prompt that was begun never waits half-way.
        if swapped is not None:
            copies = kv.swap_in(slot, swapped, total)
        else:
            with self._counting(sequence):
                copies = kv.admit(slot, sequence.digest, match, total)
        if copies is None:
            scheduler.slots.give_back(slot)
            return None
        scheduler.copies.extend(copies)
        self._seat(sequence, slot, cached)
        return slot, chunk

    def _has_headroom(self, sequence: Sequence, num_tokens: int, others: int) -> bool:
        """Whether there are blocks for `num_tokens` tokens. A preempted sequence comes back only
        when the `others` can each take one more, so that it is not preempted again at once."""
        if not sequence.num_preemptions or not others:
            return True
        kv = self._s.kv.stats()
        free = kv.num_free + kv.num_evictable - others
        return free * self._s.limits.block_size >= num_tokens

    def match(self, sequence: Sequence) -> Match:
        """What of a sequence need not be computed, because the prefix cache holds it."""
        if sequence.swapped is not None:
            return NO_MATCH  # it brings its own KV
        # Prompt logprobs need the logits of every prompt token: nothing may be skipped.
        if sequence.request.sampling.prompt_logprobs is not None:
            return NO_MATCH
        return self._s.kv.lookup(sequence.digest, sequence.known)

    def _fork_parent(self, sequence: Sequence) -> Sequence | None:
        """The running sequence whose prompt this one can share, if its KV is there."""
        request = sequence.request
        if request.parent is None or sequence.swapped is not None:
            return None
        if len(sequence.known) != sequence.num_prompt:
            return None
        parent = self._s.sequences.get(request.parent)
        if parent is None or parent.slot < 0 or sequence.num_prompt < 2:
            return None
        if int(self._s.slots.num_computed[parent.slot]) < sequence.num_prompt:
            return None
        return parent

    def _place_fork(self, sequence: Sequence, parent: Sequence) -> tuple[int, int] | None:
        scheduler = self._s
        slot = scheduler.slots.take()
        shared = sequence.num_prompt - 1  # it computes the prompt's last token itself, to sample
        with self._counting(sequence):
            copies = scheduler.kv.fork(parent.slot, slot, shared)
        if copies is None:
            scheduler.slots.give_back(slot)
            return None
        scheduler.copies.extend(copies)
        self._seat(sequence, slot, shared)
        return slot, 1

    def _counting(self, sequence: Sequence) -> AbstractContextManager[None]:
        """Around what counts as a lookup, unless this sequence was admitted before."""
        again = sequence.admitted_at is not None
        return self._s.prefix_counts.left_out() if again else nullcontext()

    def _seat(self, sequence: Sequence, slot: int, num_computed: int) -> None:
        scheduler = self._s
        scheduler.slots.seat(slot, sequence, num_computed)
        scheduler.slots.phase[slot] = Phase.PREFILL
        scheduler.note_admission(sequence, num_computed)

    def _describe(self, sequence: Sequence, slot: int) -> AdmittedRow:
        scheduler, request = self._s, sequence.request
        held = int(scheduler.kv.num_slot_blocks[slot])
        return AdmittedRow(
            slot=slot,
            handle=request.handle,
            token_ids=sequence.known,
            num_prompt=sequence.num_prompt,
            num_computed=int(scheduler.slots.num_computed[slot]),
            blocks=scheduler.kv.block_tables[:, slot, :held].copy(),
            sampling=request.sampling,
            seed=request.seed,
            index=request.index,
            eos_token_ids=request.eos_token_ids,
            adapter=request.adapter,
        )
