"""From a `StepResult` to the outputs of a step: tokens are written down, sequences end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.core.errors import INTERNAL_ERROR
from octavo.core.messages import EngineOutputs, Finish, Logprobs, StepResult
from octavo.engine.scheduler.sequences import LiveSequences
from octavo.engine.scheduler.state import SlotTable
from octavo.engine.scheduler.step import PendingStep


class Results:
    """Applies what the executor returned for a step."""

    def __init__(
        self,
        slots: SlotTable,
        manager: KVCacheManager,
        sequences: LiveSequences,
        clock: Callable[[], float],
    ) -> None:
        self._slots, self._manager = slots, manager
        self._sequences, self._clock = sequences, clock

    def apply(self, step: PendingStep, result: StepResult) -> EngineOutputs:
        """Append tokens, report full blocks, end sequences."""
        table = self._slots
        slots, handles, positions = step.sampled_slots, step.handles, step.positions
        token_ids = result.token_ids
        if step.num_vacated != table.num_vacated:
            # Tokens of sequences that ended while the step was in flight are surplus.
            rows = (table.handle[slots] == handles).nonzero()[0]
            slots, handles, positions = slots[rows], handles[rows], positions[rows]
            token_ids = token_ids[rows]
        tokens = token_ids[:, 0]
        table.put_tokens(slots, positions, tokens)
        self._report_computed(step)
        outputs = EngineOutputs(
            step=result.step,
            handles=handles,
            token_ids=token_ids,
            prompt_logprobs=result.prompt_logprobs,
        )
        if result.errors:
            self._fail_rows(result, step, outputs)
        if result.logprobs is not None:
            outputs.logprobs = _kept_logprobs(result.logprobs, step, outputs.handles)
        if len(step.sampled_slots) > step.num_decodes:
            self._mark_first_tokens(step)
        self._end_by_token(slots, positions, tokens)
        for slot in step.ending:
            sequence = table.sequences[slot]
            if sequence is not None:
                finish = Finish(handle=sequence.handle, reason="length")
                self._sequences.finish(sequence, finish)
        return outputs

    def _report_computed(self, step: PendingStep) -> None:
        slots, computed = step.slots, step.computed
        if step.num_vacated != self._slots.num_vacated:
            here = self._slots.handle[slots] >= 0
            slots, computed = slots[here], computed[here]
        self._manager.commit(slots, computed, self._slots.tokens)

    def _mark_first_tokens(self, step: PendingStep) -> None:
        now = self._clock()
        for slot in step.sampled_slots[step.num_decodes :].tolist():
            sequence = self._slots.sequences[slot]
            if sequence is not None and sequence.first_token_at is None:
                sequence.first_token_at = now
                self._sequences.queue_children(sequence)

    def _end_by_token(
        self,
        slots: NDArray[np.intp],
        positions: NDArray[np.int64],
        tokens: NDArray[np.int32],
    ) -> None:
        for row in self._sequences.stops.find(tokens):
            sequence = self._slots.sequences[slots[row]]
            if sequence is None:
                continue
            request, token = sequence.request, int(tokens[row])
            if int(positions[row]) + 1 - sequence.num_prompt <= request.sampling.min_tokens:
                continue
            if token in request.eos_token_ids and not request.sampling.ignore_eos:
                self._sequences.finish(sequence, Finish(handle=sequence.handle, reason="stop"))
            elif token in (request.sampling.stop_token_ids or ()):
                finish = Finish(handle=sequence.handle, reason="stop", stop_token=token)
                self._sequences.finish(sequence, finish)

    def _fail_rows(self, result: StepResult, step: PendingStep, outputs: EngineOutputs) -> None:
        """End the sequences whose row could not be sampled; their tokens are not shown."""
        failed = {int(step.handles[row]): text for row, text in result.errors.items()}
        faults = {int(step.handles[row]) for row in result.faults}
        good = np.asarray([handle not in failed for handle in outputs.handles.tolist()], np.bool_)
        for handle, text in failed.items():
            sequence = self._sequences.by_handle.get(handle)
            if sequence is not None:
                code = INTERNAL_ERROR if handle in faults else None
                finish = Finish(handle=handle, reason="error", error=text, code=code)
                self._sequences.finish(sequence, finish)
        outputs.handles = outputs.handles[good]
        outputs.token_ids = outputs.token_ids[good]


def _kept_logprobs(logprobs: Logprobs, step: PendingStep, handles: NDArray[np.int64]) -> Logprobs:
    """Logprobs of the rows that are still shown, their `rows` renumbered to `handles`."""
    if len(handles) == len(step.handles):
        return logprobs
    where = {handle: row for row, handle in enumerate(handles.tolist())}
    rows = [where.get(handle, -1) for handle in step.handles[logprobs.rows].tolist()]
    renumbered = np.asarray(rows, np.int32)
    kept = renumbered >= 0
    return Logprobs(
        rows=renumbered[kept],
        token_ids=logprobs.token_ids[kept],
        values=logprobs.values[kept],
        ranks=logprobs.ranks[kept],
        num=logprobs.num[kept],
    )
