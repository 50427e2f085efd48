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
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.core.contracts.preemption_policy import PreemptionPolicy
from octavo.core.contracts.scheduler_policy import SchedulerPolicy, WaitingRequest
from octavo.core.errors import RequestError, RequestTooLong
from octavo.core.messages import (
    AdmittedRow,
    EngineOutputs,
    EngineRequest,
    Finish,
    Logprobs,
    SchedulerStats,
    StepPlan,
    StepResult,
)
from octavo.core.scheduler.admission import Admission
from octavo.core.scheduler.borders import Borders
from octavo.core.scheduler.copies import CopyList
from octavo.core.scheduler.preemption import Preemption, PreemptionLog
from octavo.core.scheduler.state import Index, Phase, RowSet, Sequence, SlotTable, StopTokens

_NONE = np.empty(0, np.int32)
_NO_BLOCKS = np.empty((4, 0), np.int32)


@dataclass(frozen=True)
class SchedulerLimits:
    """max_num_seqs: slots. max_num_batched_tokens: tokens a step. max_chunk_tokens: of one prompt a
    step. chunked_prefill: False computes each prompt in one step. max_model_len: tokens of a
    sequence. vocab_size: V."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int = 16
    max_chunk_tokens: int | None = None
    chunked_prefill: bool = True


@dataclass(slots=True)
class InFlight:
    """What `commit` needs to know of a planned step. slots intp[B], computed int64[B] tokens whose
    KV the step completes. handles, sampled_slots, positions [R]: whose token, at which index of the
    sequence; the first `num_decodes` decode. departures: how many sequences had left their slot by
    then. num_host_copies of its num_copies block copies go to or come from the host. log: what was
    preempted and swapped in for it. ending: slots planned to their last token. deferred: slots
    given up since, free once this step is committed."""

    step: int
    slots: NDArray[np.intp]
    computed: NDArray[np.int64]
    handles: NDArray[np.int64]
    sampled_slots: NDArray[np.intp]
    positions: NDArray[np.int64]
    num_decodes: int
    num_prefill_tokens: int
    departures: int
    num_copies: int
    num_host_copies: int
    log: PreemptionLog
    ending: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)


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
        self.preemption = Preemption(self, preemption)
        self.on_finished: Callable[[Sequence, str], None] | None = None
        self._stops = StopTokens(limits.vocab_size)
        self._admission = Admission(self)
        self._borders = Borders(limits.block_size)
        self._due: NDArray[np.intp] = np.empty(0, np.intp)
        self._told_blocks = np.zeros(limits.max_num_seqs, np.int32)
        self._released: list[int] = []
        self._finished: list[Finish] = []
        self._cached: dict[int, int] = {}
        self._steps = 0
        self._layout: tuple[int, int] = (-1, -1)
        self._layout_number = 0
        self._batch: NDArray[np.int32] = _NONE
        self._ones = np.ones(limits.max_num_seqs, np.int32)
        self._range = np.arange(limits.max_num_seqs, dtype=np.int32)
        # No decoding row ends by length before this many steps.
        self._steps_to_length_end = 0
        self._causes_copies = type(kv).take_copies is not KVCacheManager.take_copies
        self._tells_policy = type(policy).on_step is not SchedulerPolicy.on_step

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

    def _enqueue(self, request: EngineRequest, count: int) -> None:
        now = self.clock()
        total = min(count + request.max_tokens, self.limits.max_model_len)
        room = self.kv.fits(total)
        sequence = Sequence(
            request=request,
            waiting=WaitingRequest(request.handle, now, count, request.priority, request.user),
            known=request.token_ids,
            digest=self.kv.digest(request.token_ids, request.extra_keys),
            max_total=total if room is None else room,
            arrival=now,
        )
        self.sequences[request.handle] = sequence
        self._stops.add(request)
        parent = self.sequences.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.first_token_at is None:
            parent.children.append(sequence)  # it queues when the prompt it shares is computed
        else:
            self.policy.add(sequence.waiting)

    def abort(self, handles: Seq[int], reason: str = "abort", error: str | None = None) -> None:
        """End sequences wherever they are. Unknown handles are ignored: they may just have ended.
        The `Finish` comes with the outputs of the next `commit`, or by `take_outputs`."""
        for handle in handles:
            sequence = self.sequences.get(handle)
            if sequence is not None:
                self._finish(sequence, Finish(handle=handle, reason=reason, error=error))

    def refuse(self, handle: int, reason: str, error: str | None = None) -> None:
        """End a request that was never queued; its `Finish` comes as that of `abort` does."""
        self._finished.append(Finish(handle=handle, reason=reason, error=error))

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
        if not self._room_for_decodes() or not self._admission.make_way():
            return None
        budget = self.limits.max_num_batched_tokens - len(self.decoding)
        chunks = self._plan_chunks(budget) if len(self.prefilling) else None
        if chunks is not None:
            budget -= int(chunks.sum())
        admitted, chunks = self._admission.admit(budget, chunks)
        if not self.num_running:
            return None
        return self._build_plan(admitted, chunks)

    def _room_for_decodes(self) -> bool:
        """Give every decoding row a block for its next token, preempting where blocks are short.
        False when that must wait for a step in flight."""
        while len(self.decoding):
            rows = self.decoding
            due = self._due = self._borders.due(rows, self._steps, self.slots, self.kv)
            fitting = self.kv.extend(due, self.slots.num_tokens[due]) if len(due) else 0
            if self._causes_copies:
                self.copies.extend(self.kv.take_copies())
            if fitting == len(due):
                return True
            if self.in_flight:
                return False
            assert self.num_running > 1, "one sequence alone cannot be short of blocks"
            lacks = int(self.slots.handle[due[fitting]])
            self.preemption.preempt(self.preemption.choose_victim(), lacks, "blocks")
        return True

    def _plan_chunks(self, budget: int) -> NDArray[np.int64]:
        """Tokens for each prefilling row, in the order of the rows."""
        rows, table = self.prefilling, self.slots
        want = table.num_tokens[rows.index] - table.num_computed[rows.index]
        limit = self.limits.max_chunk_tokens
        if limit is not None:
            want = np.minimum(want, limit)
        order = None
        if self._admission.policy_shapes_chunks:
            view = table.view(rows.slots.copy(), self.clock())
            cap = self.policy.cap(view, want)
            if cap is not None:
                want = np.minimum(want, np.maximum(cap, 0))
            if not len(self.decoding) and not want.any():
                want[0] = 1  # a policy that gives nothing to anybody would stop the engine
            order = self.policy.order(view)
        ordered = want if order is None else want[order]
        before = np.cumsum(ordered) - ordered
        given: NDArray[np.int64] = np.clip(budget - before, 0, ordered)
        if order is None:
            return given
        chunks: NDArray[np.int64] = np.empty_like(given)
        chunks[order] = given
        return chunks

    def _build_plan(
        self,
        admitted: list[AdmittedRow],
        chunks: NDArray[np.int64] | None,
    ) -> StepPlan | None:
        """Fix the batch, advance the state, and describe both."""
        table, num_decodes = self.slots, len(self.decoding)
        if chunks is None:
            slots, index = self.decoding.slots, self.decoding.index
            counts = self._ones[:num_decodes]
        else:
            prefill = self.prefilling.slots[chunks > 0]
            slots = np.concatenate([self.decoding.slots, prefill])
            index = slots
            counts = np.concatenate([self._ones[:num_decodes], chunks[chunks > 0]]).astype(np.int32)
        if not len(slots):
            return None
        # In a step that only decodes nobody else can have got a block.
        grown = self._due if chunks is None else slots
        appended = self._appended_blocks(grown) if len(grown) else _NO_BLOCKS
        table.num_computed[index] += counts
        computed = table.num_computed[index].copy()
        if chunks is None:
            sampling = slots
            sample_rows = self._range[:num_decodes]
        else:
            done = computed == table.num_tokens[index]
            sample_rows = np.flatnonzero(done).astype(np.int32)
            sampling = slots[done]
        copies, num_host_copies = self.copies.take()
        record = InFlight(
            step=self._steps,
            slots=slots,
            computed=computed,
            handles=table.handle[sampling],
            sampled_slots=sampling,
            positions=table.num_tokens[sampling],
            num_decodes=num_decodes,
            num_prefill_tokens=0 if chunks is None else int(counts[num_decodes:].sum()),
            departures=table.departures,
            num_copies=copies.shape[1],
            num_host_copies=num_host_copies,
            log=self.preemption.take_log(),
        )
        batch = self._batch_slots(slots, chunks is None)
        if self._tells_policy:
            self.policy.on_step(table.view(slots.copy(), self.clock()), counts.astype(np.int64))
        self._advance(sampling, index if chunks is None else sampling, record, num_decodes)
        plan = StepPlan(
            step=self._steps,
            slots=batch,
            counts=counts,
            num_decodes=num_decodes,
            sample_rows=sample_rows,
            layout=self._layout_number,
            released=np.asarray(self._released, np.int32) if self._released else _NONE,
            appended=appended,
            copies=copies,
            admitted=admitted,
        )
        self._released = []
        self.in_flight.append(record)
        self._steps += 1
        return plan

    def _batch_slots(self, slots: NDArray[np.intp], decode_only: bool) -> NDArray[np.int32]:
        """The batch as int32, the same object and layout number while nothing changes."""
        version = (self.decoding.version, 0) if decode_only else (-1, self._steps)
        if version != self._layout:
            self._layout = version
            self._layout_number += 1
            self._batch = slots.astype(np.int32)
        return self._batch

    def _appended_blocks(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """Blocks of these slots that the worker has not been told of, int32[4, n]."""
        held, told = self.kv.num_slot_blocks[slots], self._told_blocks[slots]
        rows = np.flatnonzero(held != told)
        if not rows.size:
            return _NO_BLOCKS
        slots, first, held = slots[rows], told[rows], held[rows]
        self._told_blocks[slots] = held
        counts, indices, tables = held - first, first, self.kv.block_tables
        groups = len(tables)
        if int(counts.max()) > 1:
            row = np.repeat(np.arange(len(slots)), counts)
            indices = first[row] + np.arange(len(row)) - (np.cumsum(counts) - counts)[row]
            slots = slots[row]
        appended = np.empty((4, groups, len(slots)), np.int32)
        for group in range(groups):
            appended[0, group] = group
            appended[3, group] = tables[group][slots, indices]
        appended[1], appended[2] = slots, indices
        return appended.reshape(4, -1)

    def _advance(
        self,
        sampling: NDArray[np.intp],
        index: Index,
        record: InFlight,
        num_decodes: int,
    ) -> None:
        """Count the tokens that the step will sample; rows whose prompt is complete decode from
        now on; rows that reach their length leave."""
        table = self.slots
        table.num_tokens[index] += 1
        done = sampling[num_decodes:]
        if len(done):
            table.phase[done] = Phase.DECODE
            self.prefilling.keep(table.phase[self.prefilling.slots] == Phase.PREFILL)
            self.decoding.append(done.tolist())
            left = int((table.max_total[done] - table.num_tokens[done]).min())
            self._steps_to_length_end = min(self._steps_to_length_end - 1, left)
        else:
            self._steps_to_length_end -= 1
        if self._steps_to_length_end <= 0 and len(self.decoding):
            self._find_length_ends(record)

    def _find_length_ends(self, record: InFlight) -> None:
        rows, table = self.decoding, self.slots
        left = table.max_total[rows.index] - table.num_tokens[rows.index]
        alive = left > 0
        if not alive.all():
            ending = rows.slots[~alive]
            table.phase[ending] = Phase.ENDING
            record.ending = ending.tolist()
            rows.keep(alive)
            left = left[alive]
        self._steps_to_length_end = int(left.min()) if len(left) else 0

    # ---- results --------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> EngineOutputs:
        """Apply the oldest step in flight: append tokens, end sequences, publish blocks."""
        record = self.in_flight.popleft()
        assert record.step == result.step, f"expected step {record.step}, got {result.step}"
        table = self.slots
        slots, token_ids = record.sampled_slots, result.token_ids
        handles, rows = record.handles, None
        if record.departures != table.departures:
            # Tokens of sequences that ended while the step was in flight are surplus.
            rows = np.flatnonzero(table.handle[slots] == handles)
            slots, handles, token_ids = slots[rows], handles[rows], token_ids[rows]
        positions = record.positions if rows is None else record.positions[rows]
        tokens = token_ids[:, 0]
        table.put_tokens(slots, positions, tokens)
        self._publish(record)
        self.preemption.observe(record, result)
        outputs = EngineOutputs(
            step=result.step,
            handles=handles,
            token_ids=token_ids,
            prompt_logprobs=result.prompt_logprobs,
        )
        if result.errors:
            self._fail_rows(result, record, outputs)
        if result.logprobs is not None:
            outputs.logprobs = _kept_logprobs(result, record, outputs.handles)
        self._mark_first_tokens(record)
        self._end_by_token(slots, positions, tokens)
        for slot in record.ending:
            sequence = table.sequences[slot]
            if sequence is not None:
                self._finish(sequence, Finish(handle=sequence.handle, reason="length"))
        for slot in record.deferred:
            self._release_now(slot)
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

    def _publish(self, record: InFlight) -> None:
        slots, computed = record.slots, record.computed
        if record.departures != self.slots.departures:
            gone = self.slots.handle[slots] < 0
            slots, computed = slots[~gone], computed[~gone]
        self.kv.commit(slots, computed, self.slots.tokens)

    def _mark_first_tokens(self, record: InFlight) -> None:
        first = record.sampled_slots[record.num_decodes :]
        if not len(first):
            return
        now = self.clock()
        for slot in first.tolist():
            sequence = self.slots.sequences[slot]
            if sequence is not None and sequence.first_token_at is None:
                sequence.first_token_at = now
                self._queue_children(sequence)

    def _queue_children(self, sequence: Sequence) -> None:
        for child in sequence.children:
            if child.handle in self.sequences:
                self.policy.add(child.waiting)
        sequence.children = []

    def _end_by_token(
        self,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int32],
    ) -> None:
        for row in np.flatnonzero(self._stops.mask[tokens]).tolist():
            sequence = self.slots.sequences[slots[row]]
            if sequence is None:
                continue
            request, token = sequence.request, int(tokens[row])
            if int(positions[row]) + 1 - sequence.num_prompt <= request.sampling.min_tokens:
                continue
            if token in request.eos_token_ids and not request.sampling.ignore_eos:
                self._finish(sequence, Finish(handle=sequence.handle, reason="stop"))
            elif token in (request.sampling.stop_token_ids or ()):
                self._finish(
                    sequence, Finish(handle=sequence.handle, reason="stop", stop_token=token)
                )

    def _fail_rows(self, result: StepResult, record: InFlight, outputs: EngineOutputs) -> None:
        """End the sequences whose row could not be sampled; their tokens are not shown."""
        failed = {int(record.handles[row]): text for row, text in result.errors.items()}
        good = np.asarray([handle not in failed for handle in outputs.handles.tolist()], np.bool_)
        for handle, text in failed.items():
            self.abort([handle], "error", text)
        outputs.handles = outputs.handles[good]
        outputs.token_ids = outputs.token_ids[good]

    # ---- leaving --------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, finish: Finish) -> None:
        finish.num_preemptions = sequence.num_preemptions
        del self.sequences[sequence.handle]
        self._stops.remove(sequence.request)
        self._queue_children(sequence)
        slot = sequence.slot
        if slot >= 0:
            sequence.num_output = int(self.slots.num_tokens[slot]) - sequence.num_prompt
            self.vacate(slot)
        else:
            sequence.num_output = len(sequence.known) - sequence.num_prompt
            self.policy.remove(sequence.handle)
            self.preemption.forget(sequence)
        self._finished.append(finish)
        if self.on_finished is not None:
            self.on_finished(sequence, finish.reason)

    def vacate(self, slot: int) -> None:
        """Take the sequence off its slot. The slot is free now, or after the newest step in flight,
        which may still write into its blocks."""
        phase = self.slots.phase[slot]
        if phase == Phase.DECODE:
            self.decoding.keep(self.decoding.slots != slot)
        elif phase == Phase.PREFILL:
            self.prefilling.keep(self.prefilling.slots != slot)
        self.slots.unseat(slot)
        if self.in_flight:
            self.in_flight[-1].deferred.append(slot)
        else:
            self._release_now(slot)

    def _release_now(self, slot: int) -> None:
        self.kv.release(slot)
        self._told_blocks[slot] = 0
        self._released.append(slot)
        self.slots.give_back(slot)

    # ---- inspection -----------------------------------------------------------------------------

    def note_admission(self, sequence: Sequence, num_cached: int) -> None:
        """Called by admission when a sequence has just been seated."""
        self._told_blocks[sequence.slot] = self.kv.num_slot_blocks[sequence.slot]
        if sequence.admitted_at is None:
            sequence.admitted_at = self.clock()
            sequence.num_cached = num_cached
            self._cached[sequence.handle] = num_cached

    @property
    def num_steps(self) -> int:
        """Steps planned so far."""
        return self._steps

    def stats(self) -> SchedulerStats:
        kv, preemption = self.kv.stats(), self.preemption
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


def _kept_logprobs(result: StepResult, record: InFlight, handles: NDArray[np.int64]) -> Logprobs:
    """Logprobs of the rows that are still shown, their `rows` renumbered to `handles`."""
    logprobs = result.logprobs
    assert logprobs is not None
    if len(handles) == len(record.handles):
        return logprobs
    where = {handle: row for row, handle in enumerate(handles.tolist())}
    rows = [where.get(handle, -1) for handle in record.handles[logprobs.rows].tolist()]
    renumbered = np.asarray(rows, np.int32)
    kept = renumbered >= 0
    return Logprobs(
        rows=renumbered[kept],
        token_ids=logprobs.token_ids[kept],
        values=logprobs.values[kept],
        ranks=logprobs.ranks[kept],
        num=logprobs.num[kept],
    )
