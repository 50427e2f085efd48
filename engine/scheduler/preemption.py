"""Preemption: who gives way when blocks are short, and what becomes of its KV.

The scheduler policy orders the victims, the preemption policy says for each whether its KV is
dropped or moved to the host, and the KV cache manager does it. A victim goes back to the scheduler
policy's queue either way, and comes back through admission.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from octavo.core.contracts.kv_cache_manager import SwapOut
from octavo.core.contracts.observer import PreemptionRecord
from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    StepCost,
    Victim,
)
from octavo.core.messages import StepResult
from octavo.engine.scheduler.preemption_log import PreemptionLog
from octavo.engine.scheduler.state import Sequence

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler
    from octavo.engine.scheduler.step import InFlight

_FULL = "the host pool is full"
_NOTHING = "nothing of it was computed"


_NOTHING_HAPPENED = PreemptionLog()


class Preemption:
    """num_preemptions, num_swap_outs, num_swap_ins: since start. num_swapped: sequences that are on
    the host now."""

    def __init__(self, scheduler: Scheduler, policy: PreemptionPolicy) -> None:
        self._s, self.policy = scheduler, policy
        self.num_preemptions = self.num_swap_outs = self.num_swap_ins = self.num_swapped = 0
        self._observes = type(policy).observe is not PreemptionPolicy.observe
        self._records: list[PreemptionRecord] = []
        self._swapped_in: list[int] = []

    # ---- giving way -----------------------------------------------------------------------------

    def choose_victim(self) -> int:
        """Slot of the running sequence that gives way; among equals the one admitted last."""
        scheduler = self._s
        running = np.concatenate([scheduler.decoding.slots, scheduler.prefilling.slots])
        keys = scheduler.policy.victim_keys(scheduler.slots.view(running, scheduler.clock()))
        return int(running[len(running) - 1 - int(np.argmax(keys[::-1]))])

    def preempt(self, slot: int, by: int, why: str) -> None:
        """Take a sequence off its slot; it waits to come back. No step may be in flight: what it
        computed is then in its blocks, and its tokens are known. by: handle of the sequence that it
        gives way to, which lacks a `seat` or `blocks` (why)."""
        scheduler = self._s
        assert not scheduler.in_flight, "a sequence is preempted while a step is in flight"
        sequence = scheduler.slots.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        num_computed = int(scheduler.slots.num_computed[slot])
        sequence.known = scheduler.slots.tokens[slot, : scheduler.slots.num_tokens[slot]].copy()
        sequence.lost_to = (by, why)
        swapped = self._dispose(sequence, num_computed)
        waiting = sequence.waiting
        if swapped is None:
            sequence.digest = scheduler.digest(sequence.request, sequence.known)
            waiting.num_computed = 0
        else:
            scheduler.copies.extend(swapped.copies)
            sequence.swapped, waiting.num_computed = swapped.handle, num_computed
            self.num_swapped += 1
            self.num_swap_outs += 1
        scheduler.vacate(slot)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        waiting.num_tokens, waiting.num_preemptions = len(sequence.known), sequence.num_preemptions
        scheduler.queue(sequence)

    def _dispose(self, sequence: Sequence, num_computed: int) -> SwapOut | None:
        """Ask the policy, swap the victim out where it says so and that is possible, note it."""
        kv, slot = self._s.kv, sequence.slot
        num_blocks = -(-num_computed // self._s.limits.block_size)
        victim = Victim(
            slot=slot,
            handle=sequence.handle,
            num_computed=num_computed,
            num_blocks=num_blocks,
            host_blocks_free=kv.stats().num_free_swap_blocks,
        )
        action, swapped = self.policy.decide(victim), None
        reason = self.policy.reason()
        if action is PreemptionAction.SWAP:
            swapped = kv.swap_out(slot, num_computed) if num_computed else None
            if swapped is None:
                action = PreemptionAction.RECOMPUTE
                reason = _FULL if num_computed else _NOTHING
        self._records.append(
            PreemptionRecord(
                handle=sequence.handle,
                request_id=sequence.request.request_id,
                action=action.value,
                num_computed=num_computed,
                num_blocks=num_blocks,
                reason=reason,
                lost_to=sequence.lost_to,
            )
        )
        return swapped

    # ---- coming back, or not --------------------------------------------------------------------

    def came_back(self, sequence: Sequence) -> None:
        """The sequence has been swapped in."""
        sequence.swapped, sequence.waiting.num_computed = None, 0
        self.num_swapped -= 1
        self.num_swap_ins += 1
        self._swapped_in.append(sequence.handle)

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended; if it is on the host, its blocks there are free again."""
        if sequence.swapped is not None:
            self._s.kv.swap_drop(sequence.swapped)
            sequence.swapped = None
            self.num_swapped -= 1

    # ---- telling --------------------------------------------------------------------------------

    def take_log(self) -> PreemptionLog:
        """What happened since the last call."""
        if not self._records and not self._swapped_in:
            return _NOTHING_HAPPENED
        log = PreemptionLog(tuple(self._records), tuple(self._swapped_in))
        self._records, self._swapped_in = [], []
        return log

    def observe(self, step: InFlight, result: StepResult) -> None:
        """Tell the policy what a step took, if it wants to know."""
        if self._observes:
            self.policy.observe(
                StepCost(
                    num_decodes=step.num_decodes,
                    num_prefill=step.num_prefill_tokens,
                    num_copied_blocks=step.num_host_copies,
                    compute_s=result.forward_s + result.sample_s,
                    copy_s=result.copy_s,
                )
            )
