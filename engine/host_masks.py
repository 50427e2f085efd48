"""Host logits processors: attached by plan, asked for masks while the forward pass runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.logits_processor import Ending, HostLogitsProcessor
from octavo.core.errors import INTERNAL_ERROR
from octavo.core.messages import AdmittedRow, EngineOutputs, LogitMasks, StepPlan
from octavo.engine.processor_faults import Faults, attached_request

End = Callable[[int, str, str | None, str | None], None]
"""(handle, finish reason, error, its code)."""


class HostMasks:
    """Knows which slots each processor attended to. `end` ends one sequence: what a processor may
    ask for, and all that its exception can do. label: how messages call a processor."""

    def __init__(
        self,
        processors: Sequence[HostLogitsProcessor],
        vocab_size: int,
        end: End,
        label: Callable[[object], str] = lambda processor: type(processor).__name__,
    ) -> None:
        self._processors, self._label = processors, label
        self._words = -(-vocab_size // 32)
        self._end = end
        self._attached: list[set[int]] = [set() for _ in processors]
        self._slot_of: dict[int, int] = {}
        self._handle_of: dict[int, int] = {}
        self._faults = Faults()

    def follow(self, plan: StepPlan) -> bool:
        """Attach and detach what the plan slots and releases. True when the plan needs a mask."""
        if not self._slot_of and not (self._processors and plan.admitted):
            return False
        for slot in plan.released.tolist():
            self._detach(slot)
        for row in plan.admitted:
            self._attach(row)
        masked = set().union(*self._attached)
        return bool(masked) and not masked.isdisjoint(plan.slots[plan.sample_rows].tolist())

    def masks(self, plan: StepPlan) -> LogitMasks | None:
        """Masks for the sampling rows of a plan that needs one."""
        slots = plan.slots[plan.sample_rows].astype(np.intp)
        wanted = set().union(*self._attached)
        rows = np.asarray([i for i, s in enumerate(slots.tolist()) if s in wanted], np.intp)
        if not rows.size:
            return None
        bitmask = np.full((len(rows), self._words), -1, np.int32)
        for processor, attached in zip(self._processors, self._attached, strict=True):
            mine = np.asarray(
                [i for i, s in enumerate(slots[rows].tolist()) if s in attached], np.intp
            )
            if mine.size:
                part, theirs = bitmask[mine], slots[rows[mine]]
                endings, ok = self._guard(processor, theirs, _endings, processor.mask, theirs, part)
                if ok:
                    bitmask[mine] = part
                for ending in endings or ():
                    self._finish(ending)
        return LogitMasks(rows=rows.astype(np.int32), bitmask=bitmask)

    def accept(self, outputs: EngineOutputs) -> None:
        """Tell the processors which tokens were kept, and let go of what ended: a step in flight
        needs no masks for it."""
        if not self._slot_of:
            return
        seen = [
            (self._slot_of[handle], row)
            for row, handle in enumerate(outputs.handles.tolist())
            if handle in self._slot_of
        ]
        for processor, attached in zip(self._processors, self._attached, strict=True):
            mine = [(slot, row) for slot, row in seen if slot in attached]
            if mine:
                slots = np.asarray([slot for slot, _ in mine], np.intp)
                rows = [row for _, row in mine]
                tokens = outputs.token_ids[rows, 0]
                endings, _ = self._guard(
                    processor, slots, _endings, processor.accept, slots, tokens
                )
                for ending in endings or ():
                    self._finish(ending)
        for finish in outputs.finished:
            if finish.handle in self._slot_of:
                self._detach(self._slot_of[finish.handle])

    def _attach(self, row: AdmittedRow) -> None:
        request = attached_request(row)
        slots = np.asarray([row.slot], np.intp)
        self._slot_of[row.handle], self._handle_of[row.slot] = row.slot, row.handle
        for processor, attached in zip(self._processors, self._attached, strict=True):
            wanted, ok = self._guard(processor, slots, processor.attach, request)
            if not ok:
                break
            if wanted:
                attached.add(row.slot)
        if not any(row.slot in attached for attached in self._attached):
            self._detach(row.slot)

    def _finish(self, ending: Ending) -> None:
        handle = self._handle_of.get(ending.slot)
        if handle is not None:
            self._detach(ending.slot)
            self._end(handle, "stop" if ending.error is None else "error", ending.error, None)

    def _guard(
        self,
        processor: HostLogitsProcessor,
        slots: NDArray[np.intp],
        call: Callable[..., Any],
        *args: object,
    ) -> tuple[Any, bool]:
        """`(result, True)`, or `(None, False)` after the requests in these slots were failed."""
        result, failure = self._faults.run(self._label(processor), call, *args)
        if failure is None:
            return result, True
        code = INTERNAL_ERROR if failure.fault else None
        for slot in slots.tolist():
            handle = self._handle_of[slot]
            self._detach(slot)
            self._end(handle, "error", failure.message, code)
        return None, False

    def _detach(self, slot: int) -> None:
        for processor, attached in zip(self._processors, self._attached, strict=True):
            if slot in attached:
                attached.discard(slot)
                # What this raises has no request left that it could belong to.
                self._faults.run(self._label(processor), processor.detach, slot)
        handle = self._handle_of.pop(slot, None)
        if handle is not None:
            del self._slot_of[handle]


def _endings(call: Callable[..., Any], slots: NDArray[np.intp], values: Any) -> Sequence[Ending]:
    """What `mask` or `accept` returns, checked."""
    endings = call(slots, values)
    if endings is None:
        return ()
    if not isinstance(endings, Sequence) or not all(isinstance(e, Ending) for e in endings):
        raise TypeError(f"it returned {endings!r:.80}, expected Ending objects or None")
    return endings
