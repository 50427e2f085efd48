"""From a `StepResult` to the outputs of a step: tokens are written down, sequences end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import INTERNAL_ERROR
from octavo.core.messages import EngineOutputs, Finish, Logprobs, StepResult
from octavo.engine.scheduler.step import InFlight

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler


class Results:
    """The part of the scheduler that applies what a step turned out to be worth."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._s = scheduler

    def apply(self, record: InFlight, result: StepResult) -> EngineOutputs:
        """Append tokens, report full blocks, end sequences."""
        table = self._s.slots
        slots, handles, positions = record.sampled_slots, record.handles, record.positions
        token_ids = result.token_ids
        if record.departures != table.departures:
            # Tokens of sequences that ended while the step was in flight are surplus.
            rows = (table.handle[slots] == handles).nonzero()[0]
            slots, handles, positions = slots[rows], handles[rows], positions[rows]
            token_ids = token_ids[rows]
        tokens = token_ids[:, 0]
        table.put_tokens(slots, positions, tokens)
        self._report_computed(record)
        outputs = EngineOutputs(
            step=result.step,
            handles=handles,
            token_ids=token_ids,
            prompt_logprobs=result.prompt_logprobs,
        )
        if result.errors:
            self._fail_rows(result, record, outputs)
        if result.logprobs is not None:
            outputs.logprobs = _kept_logprobs(result.logprobs, record, outputs.handles)
        if len(record.sampled_slots) > record.num_decodes:
            self._mark_first_tokens(record)
        self._end_by_token(slots, positions, tokens)
        for slot in record.ending:
            sequence = table.sequences[slot]
            if sequence is not None:
                self._s.finish(sequence, Finish(handle=sequence.handle, reason="length"))
        return outputs

    def _report_computed(self, record: InFlight) -> None:
        slots, computed = record.slots, record.computed
        if record.departures != self._s.slots.departures:
            here = self._s.slots.handle[slots] >= 0
            slots, computed = slots[here], computed[here]
        self._s.kv.commit(slots, computed, self._s.slots.tokens)

    def _mark_first_tokens(self, record: InFlight) -> None:
        now = self._s.clock()
        for slot in record.sampled_slots[record.num_decodes :].tolist():
            sequence = self._s.slots.sequences[slot]
            if sequence is not None and sequence.first_token_at is None:
                sequence.first_token_at = now
                self._s.queue_children(sequence)

    def _end_by_token(
        self,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int32],
    ) -> None:
        for row in self._s.stops.rows(tokens):
            sequence = self._s.slots.sequences[slots[row]]
            if sequence is None:
                continue
            request, token = sequence.request, int(tokens[row])
            if int(positions[row]) + 1 - sequence.num_prompt <= request.sampling.min_tokens:
                continue
            if token in request.eos_token_ids and not request.sampling.ignore_eos:
                self._s.finish(sequence, Finish(handle=sequence.handle, reason="stop"))
            elif token in (request.sampling.stop_token_ids or ()):
                finish = Finish(handle=sequence.handle, reason="stop", stop_token=token)
                self._s.finish(sequence, finish)

    def _fail_rows(self, result: StepResult, record: InFlight, outputs: EngineOutputs) -> None:
        """End the sequences whose row could not be sampled; their tokens are not shown."""
        failed = {int(record.handles[row]): text for row, text in result.errors.items()}
        faults = {int(record.handles[row]) for row in result.faults}
        good = np.asarray([handle not in failed for handle in outputs.handles.tolist()], np.bool_)
        for handle, text in failed.items():
            sequence = self._s.sequences.get(handle)
            if sequence is not None:
                code = INTERNAL_ERROR if handle in faults else None
                finish = Finish(handle=handle, reason="error", error=text, code=code)
                self._s.finish(sequence, finish)
        outputs.handles = outputs.handles[good]
        outputs.token_ids = outputs.token_ids[good]


def _kept_logprobs(logprobs: Logprobs, record: InFlight, handles: NDArray[np.int64]) -> Logprobs:
    """Logprobs of the rows that are still shown, their `rows` renumbered to `handles`."""
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
