"""Why a request took as long as it did: what happened to it, step by step, as plain data.

Recorded for requests that ask (`SamplingParams.timeline`), and for all while
`observability.timelines` is greater than 0. Nothing is done for the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.messages import EngineRequest, StepPlan

if TYPE_CHECKING:
    from octavo.engine.scheduler.scheduler import Scheduler
    from octavo.engine.scheduler.state import SequenceState

Event = dict[str, Any]

KEPT_WHEN_ASKED = 256
"""Requests that asked for their timeline and whose end is kept, whatever the configuration."""


@dataclass(slots=True)
class _Trace:
    """One sequence. slot: -1 while it has none. lost: preemptions told so far."""

    handle: int
    index: int
    events: list[Event] = field(default_factory=list)
    slot: int = -1
    lost: int = 0

    def add(self, at: float, event: str, **facts: Any) -> None:
        self.events.append({"at": at, "index": self.index, "event": event, **facts})

    def repeat(self, at: float, event: str, step: int, **facts: Any) -> bool:
        """Extend the last event when it is the same one; False when it is not."""
        last = self.events[-1] if self.events else None
        if last is None or last["event"] != event:
            return False
        if any(last[name] != value for name, value in facts.items()):
            return False
        last["until"] = at
        last["steps"] += step != last["last_step"]
        last["last_step"] = step
        return True

    def go_on(self, at: float, event: str, step: int, **facts: Any) -> None:
        """An event that may last for many steps, in a row."""
        if not self.repeat(at, event, step, **facts):
            self.add(at, event, until=at, step=step, last_step=step, steps=1, **facts)


class Timelines:
    """keep: how many of the last requests are remembered.

    Events, each with `at` (seconds on the engine's clock), `index` (of the choice) and `event`:
    `queued` (prompt_tokens, priority, user); `blocked` (on: `slot`, `tokens`, `blocks`, `queue` or
    `parent`; behind: handle that is next, for `queue`) while it waits; `admitted` (step, slot,
    cached_tokens); `chunk` (step, tokens, computed: tokens done after it); `decode` (step,
    last_step, steps: tokens); `preempted` (step, why: `blocks` or `slot`, by: the request_id that
    it gave way to); `finished` (reason, output_tokens). Those that last have `until`.
    """

    def __init__(self, keep: int, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self._keep, self._scheduler, self._clock = keep, scheduler, clock
        self._live: dict[int, _Trace] = {}
        self._by_slot: dict[int, _Trace] = {}
        self._requests: OrderedDict[str, list[_Trace]] = OrderedDict()

    @property
    def active(self) -> bool:
        """Whether a live request is traced."""
        return bool(self._live)

    def added(self, request: EngineRequest) -> None:
        """A request was queued."""
        if not self._keep and not request.sampling.timeline:
            return
        trace = _Trace(request.handle, request.index)
        trace.add(
            self._clock(),
            "queued",
            prompt_tokens=len(request.token_ids),
            priority=request.priority,
            user=request.user,
        )
        self._live[request.handle] = trace
        name = request.request_id
        if request.index == 0:
            self._requests.pop(name, None)
        self._requests.setdefault(name, []).append(trace)
        while len(self._requests) > max(self._keep, KEPT_WHEN_ASKED):
            self._requests.popitem(last=False)

    def planned(self, plan: StepPlan | None) -> None:
        """After every attempt to plan a step, while `active`."""
        now, step = self._clock(), self._scheduler.num_steps
        self._find_preempted(now, step)
        if plan is not None:
            self._note_rows(plan, now)
        waiting = [trace for trace in self._live.values() if trace.slot < 0]
        if waiting:
            self._note_blocked(waiting, plan, now, step)

    def _find_preempted(self, now: float, step: int) -> None:
        for trace in self._live.values():
            sequence = self._scheduler.sequences.get(trace.handle)
            if sequence is None or sequence.num_preemptions == trace.lost:
                continue
            trace.lost = sequence.num_preemptions
            self._by_slot.pop(trace.slot, None)
            trace.slot = -1
            by, why = sequence.lost_to or (None, "blocks")
            action = "recompute" if sequence.swapped is None else "swap"
            trace.add(now, "preempted", step=step, why=why, by=self._name(by), action=action)

    def _name(self, handle: int | None) -> str | None:
        if handle is None:
            return None
        sequence = self._scheduler.sequences.get(handle)
        return None if sequence is None else sequence.request.request_id

    def _note_rows(self, plan: StepPlan, now: float) -> None:
        for row in plan.admitted:
            trace = self._live.get(row.handle)
            if trace is not None:
                trace.slot = row.slot
                self._by_slot[row.slot] = trace
                trace.add(
                    now, "admitted", step=plan.step, slot=row.slot, cached_tokens=row.num_computed
                )
        for place, slot in enumerate(plan.slots.tolist()):
            trace = self._by_slot.get(slot)
            if trace is None:
                continue
            if place < plan.num_decodes:
                trace.go_on(now, "decode", plan.step)
            else:
                computed = int(self._scheduler.slots.num_computed[slot])
                trace.add(
                    now, "chunk", step=plan.step, tokens=int(plan.counts[place]), computed=computed
                )

    def _note_blocked(
        self, waiting: list[_Trace], plan: StepPlan | None, now: float, step: int
    ) -> None:
        scheduler = self._scheduler
        head = scheduler.policy.peek()
        planned = 0 if plan is None else int(plan.counts.sum())
        for trace in waiting:
            sequence = scheduler.sequences.get(trace.handle)
            if sequence is None:
                continue
            facts: dict[str, Any] = {}
            if not scheduler.slots.num_free:
                on = "slot"
            elif planned >= scheduler.limits.max_num_batched_tokens:
                on = "tokens"
            elif head is not None and head.handle == trace.handle:
                on = "blocks"
            elif self._waits_for_parent(sequence):
                on = "parent"
            else:
                on = "queue"
                facts["behind"] = None if head is None else self._name(head.handle)
            trace.go_on(now, "blocked", step, on=on, **facts)

    def _waits_for_parent(self, sequence: SequenceState) -> bool:
        """Whether the choice is not queued yet, because the prompt that it shares is computed."""
        number = sequence.request.parent
        parent = None if number is None else self._scheduler.sequences.get(number)
        return parent is not None and sequence in parent.children

    def finished(self, sequence: SequenceState, reason: str) -> None:
        """A sequence ended."""
        trace = self._live.pop(sequence.handle, None)
        if trace is None:
            return
        self._by_slot.pop(trace.slot, None)
        trace.add(
            self._clock(), "finished", reason=reason, output_tokens=max(sequence.num_output, 0)
        )

    def get(self, request_id: str) -> list[Event] | None:
        """The events of a request (or of those of a server's answer: `ID-0`, `ID-1`, ...) by time;
        None when nothing is known of it."""
        found = self._requests.get(request_id)
        if found is None:
            names = [n for n in self._requests if n.rpartition("-")[0] == request_id]
            found = [trace for name in names for trace in self._requests[name]]
        if not found:
            return None
        events = [dict(event) for trace in found for event in trace.events]
        return sorted(events, key=lambda event: float(event["at"]))
