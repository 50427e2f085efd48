"""From the running sequences to the rows of a step, and the state that this step leaves behind.

The state advances when a step is planned: tokens are counted before they are known, and rows that
reach their last token in it leave the batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.engine.scheduler.state import Index, SlotTable
from octavo.engine.scheduler.step import PendingStep, SchedulerLimits

_NONE = np.empty(0, np.int32)


class Planner:
    """Forms the batch of a step."""

    def __init__(self, limits: SchedulerLimits, slots: SlotTable, policy: SchedulerPolicy) -> None:
        self._limits, self._slots, self._policy = limits, slots, policy
        self._limits_chunks = (
            type(policy).cap is not SchedulerPolicy.cap
            or type(policy).order is not SchedulerPolicy.order
        )
        self._reports_steps = type(policy).on_step is not SchedulerPolicy.on_step
        self._ends = LengthEnds(slots)
        self._ones = np.ones(limits.max_num_seqs, np.int32)
        self._range = np.arange(limits.max_num_seqs, dtype=np.int32)
        self.layout = 0
        """Changes whenever the slots of a batch differ from the ones before."""
        # What the batch was when it last had only decoding rows.
        self._version = -1
        self._batch: NDArray[np.int32] = _NONE
        self._handles: NDArray[np.int64] = np.empty(0, np.int64)

    def chunks(self, budget: int) -> NDArray[np.int64]:
        """Tokens for each prefilling row, in the order of the rows."""
        rows, slots = self._slots.prefilling, self._slots
        want = slots.num_tokens[rows.index] - slots.num_computed[rows.index]
        limit = self._limits.max_chunk_tokens
        if limit is not None:
            want = np.minimum(want, limit)
        order = None
        if self._limits_chunks:
            view = slots.view(rows.slots.copy())
            cap = self._policy.cap(view, want)
            if cap is not None:
                want = np.minimum(want, np.maximum(cap, 0))
            if not len(slots.decoding) and not want.any():
                want[0] = 1  # a policy that gives nothing to anybody would stop the engine
            order = self._policy.order(view)
        ordered = want if order is None else want[order]
        before = np.cumsum(ordered) - ordered
        given: NDArray[np.int64] = np.clip(budget - before, 0, ordered)
        if order is None:
            return given
        chunks: NDArray[np.int64] = np.empty_like(given)
        chunks[order] = given
        return chunks

    def plan(self, number: int, chunks: NDArray[np.int64] | None) -> PendingStep | None:
        """Step `number`, in which all decoding rows get one token and the prefilling rows `chunks`
        (None: there are none). None when that is nothing at all."""
        step = self._decodes(number) if chunks is None else self._mixed(number, chunks)
        if step is None:
            return None
        if self._reports_steps:
            view = self._slots.view(step.slots.copy())
            self._policy.on_step(view, step.counts.astype(np.int64))
        index: Index = step.sampled_slots
        if chunks is None:
            index = self._slots.decoding.index
        self._slots.count_sampled(index)
        complete = step.sampled_slots[step.num_decodes :]
        if len(complete):
            self._slots.start_decoding(complete)
            self._ends.expect(number, complete)
        ending = self._ends.at(number)
        if ending:
            self._end(ending, step)
        return step

    def _decodes(self, number: int) -> PendingStep:
        slots, rows = self._slots, self._slots.decoding
        if rows.version != self._version:
            self._version = rows.version
            self._batch, self._handles = rows.slots.astype(np.int32), slots.handle[rows.slots]
            self.layout += 1
        slots.count_computed(rows.index, 1)
        known = slots.num_tokens[rows.index].copy()
        return PendingStep(
            step=number,
            slots=rows.slots,
            batch=self._batch,
            counts=self._ones[: len(rows)],
            computed=known,
            sample_rows=self._range[: len(rows)],
            sampled_slots=rows.slots,
            handles=self._handles,
            positions=known,
            num_decodes=len(rows),
            num_prefill_tokens=0,
            num_vacated=slots.num_vacated,
        )

    def _mixed(self, number: int, chunks: NDArray[np.int64]) -> PendingStep | None:
        table, rows = self._slots, self._slots.decoding
        given = chunks > 0
        prefill, chunks = table.prefilling.slots[given], chunks[given]
        num_decodes = len(rows)
        slots = np.concatenate([rows.slots, prefill])
        if not len(slots):
            return None
        table.count_computed(rows.index, 1)
        table.count_computed(prefill, chunks)
        computed = table.num_computed[slots]
        complete = computed[num_decodes:] == table.num_tokens[prefill]
        sampled, sample_rows = slots, self._range[: len(slots)]
        if not complete.all():
            samples = np.concatenate([self._ones[:num_decodes] > 0, complete])
            sampled, sample_rows = slots[samples], sample_rows[samples]
        self._version = -1
        self.layout += 1
        return PendingStep(
            step=number,
            slots=slots,
            batch=slots.astype(np.int32),
            counts=np.concatenate([self._ones[:num_decodes], chunks.astype(np.int32)]),
            computed=computed,
            sample_rows=sample_rows,
            sampled_slots=sampled,
            handles=table.handle[sampled],
            positions=table.num_tokens[sampled],
            num_decodes=num_decodes,
            num_prefill_tokens=int(chunks.sum()),
            num_vacated=table.num_vacated,
        )

    def _end(self, slots: list[int], step: PendingStep) -> None:
        """Take those of these slots that have reached their length out of the batch."""
        ending = [slot for slot in slots if self._slots.is_complete(slot)]
        if ending:
            step.ending = ending
            self._slots.stop_decoding(ending)


class LengthEnds:
    """The step in which each decoding row reaches its maximum length: it gets a token in every
    step. Entries of rows that have left since are harmless."""

    def __init__(self, slots: SlotTable) -> None:
        self._table = slots
        self._slots: dict[int, list[int]] = {}

    def expect(self, step: int, slots: NDArray[np.intp]) -> None:
        """These rows begin to decode; their token of this step is counted."""
        left = self._table.max_total[slots] - self._table.num_tokens[slots]
        for slot, count in zip(slots.tolist(), left.tolist(), strict=True):
            self._slots.setdefault(step + max(count, 0), []).append(slot)

    def at(self, step: int) -> list[int]:
        """Slots that may reach their length in this step."""
        return self._slots.pop(step, [])
