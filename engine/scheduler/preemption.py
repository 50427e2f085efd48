"""Preemption: who gives way when blocks are short, and what becomes of its KV.

The scheduler policy orders the victims, the preemption policy says for each whether its KV is
dropped or moved to the host, and the KV cache manager does it. A victim goes back to the scheduler
policy's queue either way, and comes back through admission.
"""

from __future__ import annotations

from octavo.core.contracts.kv_cache_manager import SwapOut
from octavo.core.contracts.observer import PreemptionRecord
from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    StepCost,
    Victim,
)
from octavo.core.messages import StepResult
from octavo.engine.scheduler.kv_cache import KVCache
from octavo.engine.scheduler.state import SequenceState, SlotTable
from octavo.engine.scheduler.step import NOTHING_PREEMPTED, PendingStep, PreemptionLog

_FULL = "the host pool is full"
_NOTHING = "nothing of it was computed"


class Preemption:
    """Takes sequences off their slots."""

    def __init__(
        self, slots: SlotTable, cache: KVCache, policy: PreemptionPolicy, block_size: int
    ) -> None:
        self._slots, self._cache, self.policy = slots, cache, policy
        self._block_size = block_size
        self._observes = type(policy).observe is not PreemptionPolicy.observe
        self._records: list[PreemptionRecord] = []
        self._swapped_in: list[int] = []
        self.num_preemptions = 0
        """Since start."""
        self.num_swap_outs = 0
        """Preemptions by swapping, since start."""
        self.num_swap_ins = 0
        """Sequences brought back from the host pool, since start."""
        self.num_swapped = 0
        """Sequences that are in the host pool now."""

    # ---- giving way ---------------------------------------------------------------------------

    def preempt(self, slot: int, by: int, why: str) -> SequenceState:
        """Vacate a slot, and return its sequence, ready to be queued again. No step may be in
        flight: what it computed is then in its blocks, and its tokens are known. by: handle of the
        sequence for which it is preempted, and which lacks a `slot` or `blocks` (why)."""
        sequence = self._slots.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        num_computed = int(self._slots.num_computed[slot])
        sequence.known = self._slots.tokens[slot, : self._slots.num_tokens[slot]].copy()
        sequence.lost_to = (by, why)
        swapped = self._dispose(sequence, num_computed)
        waiting = sequence.waiting
        if swapped is None:
            sequence.digest = self._cache.digest(sequence.request, sequence.known)
            waiting.num_computed = 0
        else:
            sequence.swapped, waiting.num_computed = swapped.handle, num_computed
            self.num_swapped += 1
            self.num_swap_outs += 1
        self._slots.vacate(slot)
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        waiting.num_tokens, waiting.num_preemptions = len(sequence.known), sequence.num_preemptions
        return sequence

    def _dispose(self, sequence: SequenceState, num_computed: int) -> SwapOut | None:
        """Ask the policy, swap the victim out where it says so and that is possible, log it."""
        manager, slot = self._cache.manager, sequence.slot
        num_blocks = -(-num_computed // self._block_size)
        victim = Victim(
            slot=slot,
            handle=sequence.handle,
            num_computed=num_computed,
            num_blocks=num_blocks,
            host_blocks_free=manager.stats().num_free_swap_blocks,
        )
        action, swapped = self.policy.decide(victim), None
        reason = self.policy.reason()
        if action is PreemptionAction.SWAP:
            swapped = self._cache.swap_out(slot, num_computed) if num_computed else None
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

    # ---- coming back, or not ------------------------------------------------------------------

    def count_swap_in(self, sequence: SequenceState) -> None:
        """The sequence has been brought back from the host pool."""
        sequence.swapped, sequence.waiting.num_computed = None, 0
        self.num_swapped -= 1
        self.num_swap_ins += 1
        self._swapped_in.append(sequence.handle)

    def drop_swapped(self, sequence: SequenceState) -> None:
        """The sequence ended. Free its blocks in the host pool, if it is there."""
        if sequence.swapped is not None:
            self._cache.manager.swap_drop(sequence.swapped)
            sequence.swapped = None
            self.num_swapped -= 1

    # ---- reporting ----------------------------------------------------------------------------

    def take_log(self) -> PreemptionLog:
        """What happened since the last call."""
        if not self._records and not self._swapped_in:
            return NOTHING_PREEMPTED
        log = PreemptionLog(tuple(self._records), tuple(self._swapped_in))
        self._records, self._swapped_in = [], []
        return log

    def observe(self, step: PendingStep, result: StepResult) -> None:
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
