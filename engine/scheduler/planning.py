"""From the rows that run to a `StepPlan`, and the state that this step leaves behind.

The state advances when a step is planned: tokens are counted before they are known, and rows that
the step brings to their last token leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.messages import AdmittedRow, StepPlan
from octavo.engine.scheduler.state import Index, Phase, SlotTable
from octavo.engine.scheduler.step import InFlight

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler

_NONE = np.empty(0, np.int32)


@dataclass(slots=True)
class _Batch:
    """Rows of a step. slots intp[B], batch: the same as int32; computed int64[B] after the step.
    sampling intp[R], sample_rows int32[R]: those that sample; index: the same, a slice where that
    is possible; handles, positions int64[R]: of the sampled tokens."""

    slots: NDArray[np.intp]
    index: Index
    batch: NDArray[np.int32]
    counts: NDArray[np.int32]
    computed: NDArray[np.int64]
    sampling: NDArray[np.intp]
    sample_rows: NDArray[np.int32]
    handles: NDArray[np.int64]
    positions: NDArray[np.int64]
    num_decodes: int
    num_prefill: int


class Planner:
    """The part of the scheduler that fixes the batch of a step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler
        seats = scheduler.limits.max_num_seqs
        self._ends = LengthEnds(scheduler.slots)
        self._tells_policy = type(scheduler.policy).on_step is not SchedulerPolicy.on_step
        self._ones = np.ones(seats, np.int32)
        self._range = np.arange(seats, dtype=np.int32)
        self._layout = 0
        # What the batch was when it last had only decoding rows.
        self._version = -1
        self._batch: NDArray[np.int32] = _NONE
        self._handles: NDArray[np.int64] = np.empty(0, np.int64)

    def chunks(self, budget: int) -> NDArray[np.int64]:
        """Tokens for each prefilling row, in the order of the rows."""
        scheduler = self._s
        rows, table = scheduler.prefilling, scheduler.slots
        want = table.num_tokens[rows.index] - table.num_computed[rows.index]
        limit = scheduler.limits.max_chunk_tokens
        if limit is not None:
            want = np.minimum(want, limit)
        order = None
        if scheduler.admission.policy_shapes_chunks:
            view = table.view(rows.slots.copy(), scheduler.clock())
            cap = scheduler.policy.cap(view, want)
            if cap is not None:
                want = np.minimum(want, np.maximum(cap, 0))
            if not len(scheduler.decoding) and not want.any():
                want[0] = 1  # a policy that gives nothing to anybody would stop the engine
            order = scheduler.policy.order(view)
        ordered = want if order is None else want[order]
        before = np.cumsum(ordered) - ordered
        given: NDArray[np.int64] = np.clip(budget - before, 0, ordered)
        if order is None:
            return given
        chunks: NDArray[np.int64] = np.empty_like(given)
        chunks[order] = given
        return chunks

    def build(
        self, step: int, admitted: list[AdmittedRow], chunks: NDArray[np.int64] | None
    ) -> StepPlan | None:
        """The step in which all decoding rows get one token and the prefilling rows `chunks` (None:
        there are none). None when that is nothing at all."""
        batch = self._decodes() if chunks is None else self._mixed(chunks)
        if batch is None:
            return None
        plan = self._describe(step, batch, admitted)
        if self._tells_policy:
            view = self._s.slots.view(batch.slots.copy(), self._s.clock())
            self._s.policy.on_step(view, batch.counts.astype(np.int64))
        self._s.slots.num_tokens[batch.index] += 1
        self._begin_to_decode(step, batch.sampling[batch.num_decodes :])
        ending = self._ends.at(step)
        if ending:
            self._end(ending)
        return plan

    def _decodes(self) -> _Batch:
        rows, table = self._s.decoding, self._s.slots
        if rows.version != self._version:
            self._version = rows.version
            self._batch, self._handles = rows.slots.astype(np.int32), table.handle[rows.slots]
            self._layout += 1
        table.num_computed[rows.index] += 1
        known = table.num_tokens[rows.index].copy()
        return _Batch(
            slots=rows.slots,
            index=rows.index,
            batch=self._batch,
            counts=self._ones[: len(rows)],
            computed=known,
            sampling=rows.slots,
            sample_rows=self._range[: len(rows)],
            handles=self._handles,
            positions=known,
            num_decodes=len(rows),
            num_prefill=0,
        )

    def _mixed(self, chunks: NDArray[np.int64]) -> _Batch | None:
        rows, table = self._s.decoding, self._s.slots
        given = chunks > 0
        prefill, chunks = self._s.prefilling.slots[given], chunks[given]
        num_decodes = len(rows)
        slots = np.concatenate([rows.slots, prefill])
        if not len(slots):
            return None
        table.num_computed[rows.index] += 1
        table.num_computed[prefill] += chunks
        computed = table.num_computed[slots]
        complete = computed[num_decodes:] == table.num_tokens[prefill]
        sampling, sample_rows = slots, self._range[: len(slots)]
        if not complete.all():
            samples = np.concatenate([self._ones[:num_decodes] > 0, complete])
            sampling, sample_rows = slots[samples], sample_rows[samples]
        self._version = -1
        self._layout += 1
        return _Batch(
            slots=slots,
            index=sampling,
            batch=slots.astype(np.int32),
            counts=np.concatenate([self._ones[:num_decodes], chunks.astype(np.int32)]),
            computed=computed,
            sampling=sampling,
            sample_rows=sample_rows,
            handles=table.handle[sampling],
            positions=table.num_tokens[sampling],
            num_decodes=num_decodes,
            num_prefill=int(chunks.sum()),
        )

    def _describe(self, step: int, batch: _Batch, admitted: list[AdmittedRow]) -> StepPlan:
        """The plan of a batch, and the note of it for `commit`."""
        scheduler = self._s
        copies, num_host_copies = scheduler.copies.take()
        released = scheduler.take_released()
        scheduler.in_flight.append(
            InFlight(
                step=step,
                slots=batch.slots,
                computed=batch.computed,
                handles=batch.handles,
                sampled_slots=batch.sampling,
                positions=batch.positions,
                num_decodes=batch.num_decodes,
                num_prefill_tokens=batch.num_prefill,
                departures=scheduler.slots.departures,
                num_copies=copies.shape[1],
                num_host_copies=num_host_copies,
                log=scheduler.preemption.take_log(),
            )
        )
        return StepPlan(
            step=step,
            slots=batch.batch,
            counts=batch.counts,
            num_decodes=batch.num_decodes,
            sample_rows=batch.sample_rows,
            layout=self._layout,
            released=np.asarray(released, np.int32) if released else _NONE,
            appended=scheduler.growth.take_appended(),
            copies=copies,
            admitted=admitted,
        )

    # ---- what the step leaves behind ------------------------------------------------------------

    def _begin_to_decode(self, step: int, complete: NDArray[np.intp]) -> None:
        """Rows whose prompt this step completes decode from now on."""
        if len(complete):
            rows, phase = self._s.prefilling, self._s.slots.phase
            phase[complete] = Phase.DECODE
            rows.keep(phase[rows.slots] == Phase.PREFILL)
            self._s.decoding.append(complete)
            self._ends.expect(step, complete)

    def _end(self, slots: list[int]) -> None:
        """Those of these rows that have reached their length leave."""
        table, rows = self._s.slots, self._s.decoding
        ending = [slot for slot in slots if table.is_complete(slot)]
        if ending:
            self._s.in_flight[-1].ending = ending
            table.phase[ending] = Phase.ENDING
            rows.keep(table.phase[rows.slots] == Phase.DECODE)


class LengthEnds:
    """In which step a decoding row reaches its length: it gets a token in every one. What was
    expected of a row that has left since comes to nothing."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._slots: dict[int, list[int]] = {}

    def expect(self, step: int, slots: NDArray[np.intp]) -> None:
        """These rows begin to decode; their token of this step is counted."""
        left = self._table.max_total[slots] - self._table.num_tokens[slots]
        for slot, count in zip(slots.tolist(), left.tolist(), strict=True):
            self._slots.setdefault(step + max(count, 0), []).append(slot)

    def at(self, step: int) -> list[int]:
        """Slots that may reach their length in this step."""
        return self._slots.pop(step, [])
