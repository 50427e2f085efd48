"""Engine extension `timelines`: why a request took as long as it did: what happened to it, step by
step, as plain data.

Recorded for requests that ask (`SamplingParams.timeline`), and for all while
`observability.timelines` is greater than 0. Nothing is done for the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.contracts.engine_extension import EngineExtension, EngineExtensionContext
from octavo.core.contracts.observer import RequestRecord
from octavo.core.contracts.provider import Options
from octavo.core.messages import EngineRequest, StepPlan

Event = dict[str, Any]

KEPT_WHEN_ASKED = 256
"""Requests that asked for their timeline and whose end is kept, whatever the configuration."""


@dataclass(slots=True)
class _Trace:
    """One sequence."""

    handle: int
    index: int
    events: list[Event] = field(default_factory=list)
    slot: int = -1  # while it waits
    num_preemptions: int = 0  # recorded so far

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

    def extend(self, at: float, event: str, step: int, **facts: Any) -> None:
        """An event that may last for many steps, in a row."""
        if not self.repeat(at, event, step, **facts):
            self.add(at, event, until=at, step=step, last_step=step, steps=1, **facts)


class Timelines(EngineExtension):
    """Remembers the last requests: as many as `observability.timelines` says.

    Events, each with `at` (seconds on the engine's clock), `index` (of the choice) and `event`:
    `queued` (prompt_tokens, priority, user); `blocked` (on: `slot`, `tokens`, `blocks`, `queue` or
    `parent`; behind: handle that is next, for `queue`) while it waits; `admitted` (step, slot,
    cached_tokens); `chunk` (step, tokens, computed: tokens done after it); `decode` (step,
    last_step, steps: tokens); `preempted` (step, why: `blocks` or `slot`, by: the request_id that
    it gave way to); `finished` (reason, output_tokens). Those that last have `until`.
    """

    def __init__(self, options: Options, context: EngineExtensionContext) -> None:
        self._keep: int = context.config.get("observability", {}).get("timelines", 0)
        self._state, self._clock = context.state, context.clock
        self._live: dict[int, _Trace] = {}
        self._by_slot: dict[int, _Trace] = {}
        self._requests: OrderedDict[str, list[_Trace]] = OrderedDict()
        self._num_preemptions = 0  # of the engine, when it was last looked for preempted sequences

    def queries(self) -> Mapping[str, Callable[..., Any]]:
        return {"timeline": self.timeline}

    def on_queued(self, request: EngineRequest) -> None:
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

    def on_plan(self, plan: StepPlan | None) -> None:
        if self._live:
            self._record_plan(plan)

    def _record_plan(self, plan: StepPlan | None) -> None:
        now, step = self._clock(), self._state.num_steps
        self._record_preemptions(now, step)
        if plan is not None:
            self._record_rows(plan, now)
        waiting = [trace for trace in self._live.values() if trace.slot < 0]
        if waiting:
            self._record_blocked(waiting, plan, now, step)

    def _record_preemptions(self, now: float, step: int) -> None:
        total = self._state.num_preemptions
        if total == self._num_preemptions:
            return
        self._num_preemptions = total
        for trace in self._live.values():
            sequence = self._state.sequence(trace.handle)
            if sequence is None or sequence.num_preemptions == trace.num_preemptions:
                continue
            trace.num_preemptions = sequence.num_preemptions
            self._by_slot.pop(trace.slot, None)
            trace.slot = -1
            by, why = sequence.lost_to or (None, "blocks")
            action = "swap" if sequence.swapped else "recompute"
            trace.add(now, "preempted", step=step, why=why, by=self._name(by), action=action)

    def _name(self, handle: int | None) -> str | None:
        sequence = None if handle is None else self._state.sequence(handle)
        return None if sequence is None else sequence.request_id

    def _record_rows(self, plan: StepPlan, now: float) -> None:
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
                trace.extend(now, "decode", plan.step)
                continue
            sequence = self._state.sequence(trace.handle)
            assert sequence is not None, "a live sequence is planned"
            trace.add(
                now,
                "chunk",
                step=plan.step,
                tokens=int(plan.counts[place]),
                computed=sequence.num_computed,
            )

    def _record_blocked(
        self, waiting: list[_Trace], plan: StepPlan | None, now: float, step: int
    ) -> None:
        state = self._state
        head = state.next_waiting()
        planned = 0 if plan is None else int(plan.counts.sum())
        for trace in waiting:
            if state.sequence(trace.handle) is None:
                continue
            facts: dict[str, Any] = {}
            if not state.num_free_slots:
                on = "slot"
            elif planned >= state.max_num_batched_tokens:
                on = "tokens"
            elif head == trace.handle:
                on = "blocks"
            elif state.waits_for_parent(trace.handle):
                on = "parent"
            else:
                on = "queue"
                facts["behind"] = self._name(head)
            trace.extend(now, "blocked", step, on=on, **facts)

    def on_finished(self, record: RequestRecord) -> None:
        trace = self._live.pop(record.handle, None)
        if trace is None:
            return
        self._by_slot.pop(trace.slot, None)
        trace.add(
            record.finished,
            "finished",
            reason=record.finish_reason,
            output_tokens=max(record.num_output, 0),
        )

    def timeline(self, request_id: str) -> list[Event] | None:
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
