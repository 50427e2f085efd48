"""Scheduler mechanics: from the state of all sequences to a `StepPlan`, and back from its result.

One plan before every forward pass. There is no prefill request and no decode request: a sequence
has `num_computed` and `num_tokens`, and a step advances the first toward the second. Sequences that
run go first, then waiting ones, within two budgets (`max_num_seqs`, `max_num_batched_tokens`). The
policy orders; this module never looks at anything but what the policy's contract returns.

State advances when a step is planned, so that step N + 1 can be planned while N runs. What a step
turns out to be worth (token ids, ends) is applied by `commit`. Slots and blocks that are given up
while a step is in flight are reused only after it was committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.core.contracts.preemption_policy import PreemptionPolicy
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest
from octavo.core.errors import RequestError, RequestTooLong
from octavo.core.messages import (
    EngineOutputs,
    EngineRequest,
    Finish,
    SchedulerStats,
    StepPlan,
    StepResult,
)
from octavo.engine.scheduler.admission import Admission
from octavo.engine.scheduler.copies import CopyList
from octavo.engine.scheduler.growth import Growth
from octavo.engine.scheduler.planning import Planner
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.prefix_counts import PrefixCounts
from octavo.engine.scheduler.results import Results
from octavo.engine.scheduler.state import Phase, RowSet, Sequence, SlotTable, StopTokens
from octavo.engine.scheduler.step import InFlight, SchedulerLimits


class Scheduler:
    """Owns slots, budgets and the order of events. Single-threaded."""

    def __init__(
        self,
        limits: SchedulerLimits,
        kv: KVCacheManager,
        policy: SchedulerPolicy,
        preemption: PreemptionPolicy,
        clock: Callable[[], float],
    ) -> None:
        self.limits, self.kv, self.policy = limits, kv, policy
        self.clock = clock
        self.slots = SlotTable(limits.max_num_seqs, limits.max_model_len)
        self.sequences: dict[int, Sequence] = {}
        self.decoding, self.prefilling = RowSet(), RowSet()
        self.in_flight: deque[InFlight] = deque()
        self.copies = CopyList()
        self.prefix_counts = PrefixCounts(kv)
        self.preemption = Preemption(self, preemption)
        self.admission = Admission(self)
        self.growth = Growth(self)
        self.stops = StopTokens(limits.vocab_size)
        self.on_finished: Callable[[Sequence, str], None] | None = None
        self._planner, self._results = Planner(self), Results(self)
        self._released: list[int] = []
        self._leaving: list[tuple[int, int]] = []
        self._finished: list[Finish] = []
        self._cached: dict[int, int] = {}
        self._steps = 0
        self._extra_keys: list[bytes] = []

    # ---- requests -------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Queue a request, or raise `RequestError` when it can never run."""
        self.check(request)
        self._enqueue(request, len(request.token_ids))

    def check(self, request: EngineRequest) -> None:
        """Raise `RequestError` for a request that can never run."""
        if request.handle in self.sequences:
            raise RequestError(f"handle {request.handle} is in use", param="handle")
        count, longest = len(request.token_ids), self.limits.max_model_len
        if not count:
            raise RequestError("the prompt is empty, expected at least one token", param="prompt")
        if count + 1 > longest:
            raise RequestTooLong.of_prompt(count, f"max_model_len is {longest}")
        most = self.kv.fits(count + 1)
        if most is not None:
            raise RequestTooLong.of_prompt(
                count, f"the KV cache holds {most} tokens of one sequence"
            )
        budget = self.limits.max_num_batched_tokens
        if not self.limits.chunked_prefill and count > budget:
            raise RequestTooLong(
                f"the prompt has {count} tokens, but without chunked prefill a step computes at "
                f"most {budget}",
                param="prompt",
                code="context_length_exceeded",
            )

    def _enqueue(self, request: EngineRequest, count: int) -> None:
        now = self.clock()
        total = min(count + request.max_tokens, self.limits.max_model_len)
        room = self.kv.fits(total)
        sequence = Sequence(
            request=request,
            waiting=WaitingRequest(request.handle, now, count, request.priority, request.user),
            known=request.token_ids,
            digest=self.digest(request, request.token_ids),
            max_total=total if room is None else room,
            arrival=now,
        )
        self.sequences[request.handle] = sequence
        self.stops.add(request)
        parent = self.sequences.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.first_token_at is None:
            parent.children.append(sequence)  # it queues when the prompt it shares is computed
        else:
            self.queue(sequence)

    def digest(self, request: EngineRequest, token_ids: NDArray[np.int32]) -> Any:
        """What finds these tokens of a request in the prefix cache."""
        return self.kv.digest(token_ids, [*request.extra_keys, *self._extra_keys])

    def forward_changed(self, version: int) -> None:
        """The model's forward pass is another (`CausalLM.forward_version`): no KV that was computed
        before is found by a sequence that is not running now."""
        self._extra_keys = [b"forward:%d" % version]
        for sequence in self.sequences.values():
            if sequence.slot < 0 and sequence.swapped is None:
                sequence.digest = self.digest(sequence.request, sequence.known)
        self.kv.reset_prefix_cache()  # at once where nothing runs, else block by block

    def queue(self, sequence: Sequence) -> None:
        """Hand a sequence without a slot to the policy."""
        sequence.waiting.num_cached = self.admission.match(sequence).num_tokens
        self.policy.add(sequence.waiting)

    def abort(
        self,
        handles: Seq[int],
        reason: str = "abort",
        error: str | None = None,
        code: str | None = None,
    ) -> None:
        """End sequences wherever they are. Unknown handles are ignored: they may just have ended.
        error, code: as in `Finish`.
        The `Finish` comes with the outputs of the next `commit`, or by `take_outputs`."""
        for handle in handles:
            sequence = self.sequences.get(handle)
            if sequence is not None:
                finish = Finish(handle=handle, reason=reason, error=error, code=code)
                self.finish(sequence, finish)
        self._let_leave()

    def refuse(self, handle: int, reason: str, error: RequestError | None = None) -> None:
        """End a request that was never queued; its `Finish` comes as that of `abort` does."""
        finish = Finish(handle=handle, reason=reason)
        if error is not None:
            finish.error, finish.param, finish.code = error.message, error.param, error.code
        self._finished.append(finish)

    @property
    def num_preemptions(self) -> int:
        """Since start."""
        return self.preemption.num_preemptions

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def num_swapped(self) -> int:
        """Waiting sequences whose KV is on the host."""
        return self.preemption.num_swapped

    def has_work(self) -> bool:
        """Whether a plan could be made, or a result or a `Finish` is still to come."""
        return bool(self.sequences or self.in_flight or self._finished)

    # ---- planning -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to compute, or nothing before a step in
        flight is committed."""
        if not self.growth.make_room() or not self.admission.make_way():
            return None
        budget = self.limits.max_num_batched_tokens - len(self.decoding)
        chunks = self._planner.chunks(budget) if len(self.prefilling) else None
        if chunks is not None:
            budget -= int(chunks.sum())
        admitted, chunks = self.admission.admit(budget, chunks)
        if not self.num_running:
            return None
        plan = self._planner.build(self._steps, admitted, chunks)
        if plan is not None:
            self._steps += 1
        return plan

    def catch_up(self) -> None:
        """Do what nobody waits for. Called when a step has just been handed to the executor."""
        self.kv.catch_up()

    # ---- results --------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> EngineOutputs:
        """Apply the oldest step in flight: append tokens, end sequences, publish blocks."""
        record = self.in_flight.popleft()
        assert record.step == result.step, f"expected step {record.step}, got {result.step}"
        outputs = self._results.apply(record, result)
        self.preemption.observe(record, result)
        self._let_leave()
        for slot in record.deferred:
            self._release(slot)
        return self._complete(outputs)

    def take_outputs(self) -> EngineOutputs | None:
        """What ended without a step (aborts of waiting sequences), or None."""
        if not self._finished:
            return None
        empty = np.empty(0, np.int64)
        return self._complete(
            EngineOutputs(step=self._steps, handles=empty, token_ids=np.empty((0, 1), np.int32))
        )

    def _complete(self, outputs: EngineOutputs) -> EngineOutputs:
        outputs.finished, self._finished = self._finished, []
        if self._cached:
            outputs.cached, self._cached = self._cached, {}
        outputs.stats = self.stats()
        return outputs

    # ---- leaving --------------------------------------------------------------------------------

    def finish(self, sequence: Sequence, finish: Finish) -> None:
        """End a sequence. If it has a slot, this is free after the next `_let_leave`."""
        finish.num_preemptions = sequence.num_preemptions
        del self.sequences[sequence.handle]
        self.stops.remove(sequence.request)
        self.queue_children(sequence)
        slot = sequence.slot
        if slot >= 0:
            sequence.num_output = int(self.slots.num_tokens[slot]) - sequence.num_prompt
            self._unseat(slot)
        else:
            sequence.num_output = len(sequence.known) - sequence.num_prompt
            self.policy.remove(sequence.handle)
            self.preemption.forget(sequence)
        self._finished.append(finish)
        if self.on_finished is not None:
            self.on_finished(sequence, finish.reason)

    def queue_children(self, sequence: Sequence) -> None:
        """The prompt that these choices share is computed, or nobody computes it any more."""
        for child in sequence.children:
            if child.handle in self.sequences:
                self.queue(child)
        sequence.children = []

    def vacate(self, slot: int) -> None:
        """Take the sequence off its slot: it was preempted."""
        self._unseat(slot)
        self._let_leave()

    def _unseat(self, slot: int) -> None:
        self._leaving.append((slot, int(self.slots.phase[slot])))
        self.slots.unseat(slot)

    def _let_leave(self) -> None:
        """Take the rows of sequences without a slot out of the batch. Their slots are free now, or
        after the newest step in flight, which may still write into their blocks."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        for phase, rows in ((Phase.DECODE, self.decoding), (Phase.PREFILL, self.prefilling)):
            if any(was == phase for _, was in leaving):
                rows.keep(self.slots.phase[rows.slots] == phase)
        for slot, _ in leaving:
            if self.in_flight:
                self.in_flight[-1].deferred.append(slot)
            else:
                self._release(slot)

    def _release(self, slot: int) -> None:
        self.kv.release(slot)
        self.growth.left(slot)
        self._released.append(slot)
        self.slots.give_back(slot)

    def take_released(self) -> list[int]:
        """Slots that became free since the last call."""
        released, self._released = self._released, []
        return released

    # ---- inspection -----------------------------------------------------------------------------

    def note_admission(self, sequence: Sequence, num_cached: int) -> None:
        """Called by admission when a sequence has just been seated."""
        self.growth.seated(sequence.slot)
        if sequence.admitted_at is None:
            sequence.admitted_at = self.clock()
            sequence.num_cached = num_cached
            self._cached[sequence.handle] = num_cached

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._steps

    def stats(self) -> SchedulerStats:
        kv, preemption = self.prefix_counts.stats(), self.preemption
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
