"""`EngineCore`: the plan, execute, commit loop, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts.engine_extension import EngineExtension
from octavo.core.contracts.executor import Executor, Ticket
from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.contracts.observer import Observer, RequestRecord, StateRecord, StepRecord
from octavo.core.errors import RequestError
from octavo.core.messages import EngineOutputs, EngineRequest, StepPlan, StepResult
from octavo.core.registry.faults import Owners
from octavo.engine.extensions import Extensions
from octavo.engine.host_masks import HostMasks
from octavo.engine.observers import Observers
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.state import SequenceState
from octavo.engine.scheduler.step import PendingStep
from octavo.engine.timing import StepTiming

HELD_WAIT_S = 0.01
"""Seconds that a step with nothing to compute waits for a request that an extension holds."""


@dataclass(slots=True)
class _SubmittedStep:
    ticket: Ticket
    plan: StepPlan
    started: float  # on time.perf_counter
    schedule_s: float
    sampled: bool


class EngineCore:
    """All calls come from one thread.

    With an executor that takes several plans in flight, step N + 1 is planned and submitted before
    step N is collected; a step that needs masks samples only after the one before it is committed.
    """

    report: Any = None
    """The `StartupReport`, where `build_engine` made this."""
    resolved: Any = None
    """The `Resolved` configuration, likewise."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        host_processors: Sequence[HostLogitsProcessor] = (),
        observers: Sequence[tuple[str, Observer]] = (),
        extensions: Sequence[EngineExtension] = (),
        owners: Owners | None = None,
    ) -> None:
        self._owners = owners or Owners()
        self.scheduler, self.executor = scheduler, executor
        self.clock = scheduler.clock
        self.timing = StepTiming()
        self.observers = Observers(observers)
        self.extensions = Extensions(extensions)
        self._masks = HostMasks(
            (*host_processors, *self.extensions.host_processors),
            scheduler.limits.vocab_size,
            self._end,
            label=self._owners.label,
        )
        self._submitted: deque[_SubmittedStep] = deque()
        self._forward_version = executor.forward_version
        self._closed = False
        scheduler.live.on_finished = self._record_finished

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` when it can never run."""
        if request.sampling.structured_outputs is not None and not self.extensions.host_processors:
            raise RequestError(
                "structured output is not available: no engine extension provides it",
                param="structured_outputs",
            )
        with self._owners:
            if self.extensions.has_gates:
                self.scheduler.check(request)
                if not self.extensions.admit(request):
                    return
            self._queue(request)

    def _queue(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        for on_queued in self.extensions.on_queued:
            on_queued(request)

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        """End these sequences; those that have ended already are ignored. reason: what they end
        by, `abort`, or `stop` where the front end found a stop string."""
        with self._owners:
            for handle in self.extensions.abort(handles):
                self.scheduler.refuse(handle, reason)
            self.scheduler.abort(handles, reason)

    def has_work(self) -> bool:
        """Whether `step` would do anything, or an extension holds a request."""
        return bool(self._submitted or self.extensions.held) or self.scheduler.has_work()

    def step(self) -> EngineOutputs | None:
        """Advance by one step and return what it produced, or None when there was nothing to do.

        Raises `PluginFault`, which names the implementation, for an exception in one of those that
        the whole engine depends on.
        """
        with self._owners:
            return self._step()

    def _step(self) -> EngineOutputs | None:
        if self.extensions.held:
            self._poll_held()
        while len(self._submitted) < self.executor.max_in_flight:
            if self._submitted and not self._submitted[-1].sampled:
                break  # the next forward pass needs its tokens
            if not self._submit():
                break
        if self._submitted:
            return self._collect()
        outputs = self.scheduler.take_outputs()
        if outputs is not None and self.observers.want_states:
            self._record_state()
        return outputs

    def _poll_held(self) -> None:
        """Queue the requests that extensions hold no longer."""
        busy = self._submitted or self.scheduler.has_work()
        for request, refusal in self.extensions.poll(0.0 if busy else HELD_WAIT_S):
            if refusal is None:
                self._queue(request)
            else:
                self.scheduler.refuse(request.handle, "error", refusal)

    def _submit(self) -> bool:
        started = time.perf_counter()
        if self.executor.forward_version != self._forward_version:
            self._forward_version = self.executor.forward_version
            self.scheduler.forward_changed(self._forward_version)
        plan = self.scheduler.plan()
        for on_plan in self.extensions.on_plan:
            on_plan(plan)
        if plan is None:
            return False
        plan.needs_mask = self._masks.follow(plan)
        schedule_s = time.perf_counter() - started
        ticket = self.executor.submit(plan)
        self._submitted.append(_SubmittedStep(ticket, plan, started, schedule_s, sampled=False))
        if not plan.needs_mask or len(self._submitted) == 1:
            self._sample(self._submitted[-1])
        self.scheduler.catch_up()
        return True

    def _sample(self, step: _SubmittedStep) -> None:
        masks = self._masks.masks(step.plan) if step.plan.needs_mask else None
        self.executor.sample(step.ticket, masks)
        step.sampled = True

    def _collect(self) -> EngineOutputs:
        step = self._submitted.popleft()
        result = self.executor.collect(step.ticket)
        started = time.perf_counter()
        record = self.scheduler.in_flight[0]
        outputs = self.scheduler.commit(result)
        self._masks.accept(outputs)
        for on_commit in self.extensions.on_commit:
            on_commit(outputs)
        if self._submitted and not self._submitted[0].sampled:
            self._sample(self._submitted[0])
        commit_s = time.perf_counter() - started
        self.timing.record(step.schedule_s, result, commit_s)
        if self.observers.want_steps:
            self._record_step(step, result, outputs, record, commit_s)
        return outputs

    def _end(self, handle: int, reason: str, error: str | None, code: str | None) -> None:
        self.scheduler.abort([handle], reason, error, code)

    def _record_step(
        self,
        step: _SubmittedStep,
        result: StepResult,
        outputs: EngineOutputs,
        planned: PendingStep,
        commit_s: float,
    ) -> None:
        scheduler = self.scheduler
        self.observers.step(
            StepRecord(
                step=result.step,
                started=step.started,
                schedule_s=step.schedule_s,
                prepare_s=result.prepare_s,
                forward_s=result.forward_s,
                sample_s=result.sample_s,
                commit_s=commit_s,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + len(self.extensions.held),
                num_tokens=int(step.plan.counts.sum()),
                num_prefill=planned.num_prefill_tokens,
                num_sampled=len(outputs.handles),
                num_preempted=scheduler.num_preemptions,
                kv=scheduler.cache.stats(),
                num_swapped=scheduler.num_swapped,
                preemptions=planned.log.records,
                swapped_in=planned.log.swapped_in,
                num_copies=planned.num_copies,
                copy_s=result.copy_s,
            )
        )

    def _record_state(self) -> None:
        scheduler = self.scheduler
        self.observers.state(
            StateRecord(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + len(self.extensions.held),
                num_swapped=scheduler.num_swapped,
                kv=scheduler.cache.stats(),
            )
        )

    def _record_finished(self, sequence: SequenceState, reason: str) -> None:
        record = RequestRecord(
            request_id=sequence.request.request_id,
            handle=sequence.handle,
            arrival=sequence.arrival,
            admitted=sequence.admitted_at,
            first_token=sequence.first_token_at,
            finished=self.clock(),
            num_prompt=sequence.num_prompt,
            num_output=sequence.num_output,
            num_cached=sequence.num_cached,
            num_preemptions=sequence.num_preemptions,
            finish_reason=reason,
            index=sequence.request.index,
        )
        for on_finished in self.extensions.on_finished:
            on_finished(record)
        self.observers.request(record)

    def query(self, name: str, *args: Any) -> Any:
        """Ask an extension (`EngineExtension.queries`): plain values in and out. Raises
        `OctavoError` where none answers to this name."""
        return self.extensions.query(name, *args)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while blocks are in use."""
        return self.scheduler.kv.reset_prefix_cache()

    def metrics(self) -> dict[str, Any]:
        """Step phases, the scheduler's state and what extensions add, as plain data."""
        stats = self.scheduler.stats()
        return {
            **self.timing.summary(),
            **{name: getattr(stats, name) for name in stats.__struct_fields__},
            "kv_cache_usage": self.scheduler.kv.stats().usage,
            "observer_failures": dict(self.observers.num_failures),
            **self.extensions.metrics(),
        }

    def close(self) -> None:
        """Stop the workers. More than one call is harmless."""
        if not self._closed:
            self._closed = True
            try:
                self.observers.close()
                self.extensions.close()
            finally:
                self.executor.close()
