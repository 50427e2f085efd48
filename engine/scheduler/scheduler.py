"""The scheduler: from the state of all sequences to a `StepPlan`, and back from its result.

One plan before every forward pass. There are no prefill and decode requests: a sequence has
`num_computed` and `num_tokens`, and a step advances the first toward the second. Running sequences
go first, then waiting ones, within two budgets (`max_num_seqs`, `max_num_batched_tokens`). The
policy orders; the scheduler uses nothing of it but what its contract returns.

State advances when a step is planned, so that step N + 1 can be planned while step N runs. Token
ids, and the ends that follow from them, are applied by `commit`. Slots and blocks given up while a
step is in flight are reused only after its commit.

`Scheduler` decides the order of events; each of its collaborators does one thing with the few
objects that it is given (`SlotTable`, `KVCache`, policy, limits), and none knows the scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.core.contracts.preemption_policy import PreemptionPolicy
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest
from octavo.core.errors import RequestError, RequestTooLong
from octavo.core.messages import (
    AdmittedRow,
    EngineOutputs,
    EngineRequest,
    Finish,
    StepPlan,
    StepResult,
)
from octavo.engine.scheduler.admission import Admission
from octavo.engine.scheduler.growth import Growth
from octavo.engine.scheduler.kv_cache import KVCache
from octavo.engine.scheduler.planning import Planner
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.release import SlotReleaser
from octavo.engine.scheduler.results import Results
from octavo.engine.scheduler.sequences import LiveSequences
from octavo.engine.scheduler.state import SequenceState, SlotTable
from octavo.engine.scheduler.step import PendingStep, SchedulerLimits

_NONE = np.empty(0, np.int32)


class SchedulerStats(msgspec.Struct, kw_only=True):
    """The scheduler's state now. Blocks, queries and hits as in `KVStats`."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    prefix_queries: int
    prefix_hits: int
    num_preemptions: int
    """Since start."""
    num_swapped: int
    """Sequences that wait with their KV in the host pool."""
    num_swap_outs: int
    """Preemptions by swapping, since start."""
    num_swap_ins: int
    """Since start."""
    num_swap_blocks: int
    num_free_swap_blocks: int
    host_cache_blocks: int
    host_cache_used: int
    host_cache_queries: int
    host_cache_hits: int


class Scheduler:
    """Plans steps and applies their results. Single-threaded."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        policy: SchedulerPolicy,
        preemption: PreemptionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.limits, self.kv, self.policy, self.clock = limits, kv, policy, clock
        self.in_flight: deque[PendingStep] = deque()
        self.slots = slots = SlotTable(limits.max_num_seqs, limits.max_model_len, clock)
        self.cache = cache = KVCache(kv)
        self.preemption = Preemption(slots, cache, preemption, limits.block_size)
        self.live = LiveSequences(slots, cache, policy, self.preemption, limits.vocab_size)
        self.sequences = self.live.by_handle
        self._admission = Admission(limits, slots, cache, policy, self.sequences)
        self._growth = Growth(slots, cache, limits.block_size)
        self._planner = Planner(limits, slots, policy)
        self._results = Results(slots, kv, self.live, clock)
        self._releaser = SlotReleaser(slots, kv, self.in_flight)
        self._cached: dict[int, int] = {}
        self._steps = 0

    # ---- requests -------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or raise `RequestError` when it can never run."""
        self.check(request)
        now, count = self.clock(), len(request.token_ids)
        total = min(count + request.max_tokens, self.limits.max_model_len)
        room = self.kv.fits(total)
        self.live.add(
            SequenceState(
                request=request,
                waiting=WaitingRequest(request.handle, now, count, request.priority, request.user),
                known=request.token_ids,
                digest=self.cache.digest(request, request.token_ids),
                max_total=total if room is None else room,
                arrival=now,
            )
        )

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` for a request that can never run."""
        if request.handle in self.sequences:
            raise RequestError(f"handle {request.handle} is in use", param="handle")
        count, longest = len(request.token_ids), self.limits.max_model_len
        if not count:
            raise RequestError("the prompt is empty, expected at least one token", param="prompt")
        if count + 1 > longest:
            raise RequestTooLong(
                f"the prompt has {count} tokens and needs room for one more, but max_model_len is "
                f"{longest}",
                param="prompt",
                code="context_length_exceeded",
            )
        most = self.kv.fits(count + 1)
        if most is not None:
            raise RequestTooLong(
                f"the prompt has {count} tokens and needs room for one more, but the whole KV cache"
                f" holds {most} tokens of one sequence",
                param="prompt",
                code="context_length_exceeded",
            )
        budget = self.limits.max_num_batched_tokens
        if not self.limits.chunked_prefill and count > budget:
            raise RequestTooLong(
                f"the prompt has {count} tokens, but without chunked prefill a step computes at "
                f"most {budget}",
                param="prompt",
                code="context_length_exceeded",
            )

    def forward_changed(self, version: int) -> None:
        """The model's forward pass changed (`CausalLM.forward_version`): sequences that do not run
        now no longer find KV computed before."""
        self.cache.set_forward_version(version)
        for sequence in self.sequences.values():
            if sequence.slot < 0 and sequence.swapped is None:
                sequence.digest = self.cache.digest(sequence.request, sequence.known)
        self.kv.reset_prefix_cache()  # at once where nothing runs, else block by block

    def abort(
        self,
        handles: Sequence[int],
        reason: str = "abort",
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        """End sequences, running or waiting. Unknown handles are ignored: they may just have ended.
        error, code: as in `Finish`. The `Finish` comes with the outputs of the next `commit`, or
        by `take_outputs`."""
        for handle in handles:
            sequence = self.sequences.get(handle)
            if sequence is not None:
                finish = Finish(handle=handle, reason=reason, error=error, code=code)
                self.live.finish(sequence, finish)
        self._releaser.release_vacated()

    def refuse(self, handle: int, reason: str, error: RequestError | None = None) -> None:
        """End a request that was never added; its `Finish` comes as that of `abort` does."""
        finish = Finish(handle=handle, reason=reason)
        if error is not None:
            finish.error, finish.param, finish.code = error.message, error.param, error.code
        self.live.refuse(finish)

    def has_work(self) -> bool:
        """Whether a plan could be made, or a result or a `Finish` is still to come."""
        return bool(self.sequences or self.in_flight or self.live.any_finished)

    # ---- planning -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute, or nothing before a step in
        flight is committed."""
        slots = self.slots
        while (slot := self._growth.extend(self._steps)) is not None:
            if self.in_flight:
                return None
            assert slots.num_running > 1, "one sequence alone cannot be short of blocks"
            self._preempt(self._choose_victim(), int(slots.handle[slot]), "blocks")
        if self._admission.may_preempt and len(self.policy) and not self._preempt_for_waiting():
            return None
        budget = self.limits.max_num_batched_tokens - len(slots.decoding)
        chunks = self._planner.chunks(budget) if len(slots.prefilling) else None
        if chunks is not None:
            budget -= int(chunks.sum())
        admitted, chunks = self._admission.admit(budget, chunks)
        if admitted:
            self._note_admitted(admitted)
        if not slots.num_running:
            return None
        step = self._planner.plan(self._steps, chunks)
        if step is None:
            return None
        self._steps += 1
        return self._describe(step, admitted)

    def _choose_victim(self) -> int:
        """Slot of the running sequence that gives way; among equals the one admitted last."""
        running = self.slots.running
        keys = self.policy.victim_keys(self.slots.view(running))
        return int(running[len(running) - 1 - int(np.argmax(keys[::-1]))])

    def _preempt_for_waiting(self) -> bool:
        """Let the policy preempt for the next waiting request, where that lacks a slot or blocks.
        False when that must wait for a step in flight: the victim's last token is not known yet."""
        if any(step.ending or step.deferred for step in self.in_flight):
            return True  # a step in flight is about to free some
        while (claim := self._admission.find_victim()) is not None:
            if self.in_flight:
                return False
            self._preempt(*claim)
        return True

    def _preempt(self, slot: int, by: int, why: str) -> None:
        sequence = self.preemption.preempt(slot, by, why)
        self._releaser.release_vacated()
        self.live.queue(sequence)

    def _note_admitted(self, rows: list[AdmittedRow]) -> None:
        for row in rows:
            sequence = self.sequences[row.handle]
            if sequence.swapped is not None:
                self.preemption.count_swap_in(sequence)
            if sequence.admitted_at is None:
                sequence.admitted_at = self.clock()
                sequence.num_cached = self._cached[row.handle] = row.num_computed

    def _describe(self, step: PendingStep, admitted: list[AdmittedRow]) -> StepPlan:
        """The plan of a step, which is in flight from now on."""
        copies, step.num_host_copies = self.cache.take_copies()
        step.num_copies = copies.shape[1]
        step.log = self.preemption.take_log()
        freed = self._releaser.take_freed()
        self.in_flight.append(step)
        return StepPlan(
            step=step.step,
            slots=step.batch,
            counts=step.counts,
            num_decodes=step.num_decodes,
            sample_rows=step.sample_rows,
            layout=self._planner.layout,
            released=np.asarray(freed, np.int32) if freed else _NONE,
            appended=self._growth.take_appended(),
            copies=copies,
            admitted=admitted,
        )

    def catch_up(self) -> None:
        """Do deferred work. Called when a step has just been handed to the executor."""
        self.kv.catch_up()

    # ---- results --------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> EngineOutputs:
        """Apply the oldest step in flight: append tokens, end sequences, publish blocks."""
        step = self.in_flight.popleft()
        assert step.step == result.step, f"expected step {step.step}, got {result.step}"
        outputs = self._results.apply(step, result)
        self.preemption.observe(step, result)
        self._releaser.release_vacated()
        if step.deferred:
            self._releaser.free(step.deferred)
        return self._complete(outputs)

    def take_outputs(self) -> EngineOutputs | None:
        """Sequences that ended without a step (aborted while waiting), or None."""
        if not self.live.any_finished:
            return None
        empty = np.empty(0, np.int64)
        return self._complete(
            EngineOutputs(step=self._steps, handles=empty, token_ids=np.empty((0, 1), np.int32))
        )

    def _complete(self, outputs: EngineOutputs) -> EngineOutputs:
        outputs.finished = self.live.take_finished()
        if self._cached:
            outputs.cached, self._cached = self._cached, {}
        return outputs

    # ---- inspection -----------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._steps

    @property
    def num_running(self) -> int:
        return self.slots.num_running

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def num_preemptions(self) -> int:
        """Since start."""
        return self.preemption.num_preemptions

    @property
    def num_swapped(self) -> int:
        """Waiting sequences whose KV is in the host pool."""
        return self.preemption.num_swapped

    def stats(self) -> SchedulerStats:
        kv, preemption = self.cache.stats(), self.preemption
        return SchedulerStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=kv.num_blocks,
            num_free_blocks=kv.num_free,
            num_evictable_blocks=kv.num_evictable,
            prefix_queries=kv.prefix_queries,
            prefix_hits=kv.prefix_hits,
            num_preemptions=preemption.num_preemptions,
            num_swapped=preemption.num_swapped,
            num_swap_outs=preemption.num_swap_outs,
            num_swap_ins=preemption.num_swap_ins,
            num_swap_blocks=kv.num_swap_blocks,
            num_free_swap_blocks=kv.num_free_swap_blocks,
            host_cache_blocks=kv.host_cache_blocks,
            host_cache_used=kv.host_cache_used,
            host_cache_queries=kv.host_cache_queries,
            host_cache_hits=kv.host_cache_hits,
        )
