"""`EngineCore`: the plan, execute, commit loop, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts.executor import Executor, Ticket
from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.contracts.observer import Observer, RequestRecord, StateRecord, StepRecord
from octavo.core.messages import EngineOutputs, EngineRequest, StepPlan, StepResult
from octavo.core.registry.faults import Owners, PluginTimes
from octavo.engine.grammar.desk import Grammars
from octavo.engine.grammar.processor import GrammarProcessor
from octavo.engine.host_masks import HostMasks
from octavo.engine.observers import Observers
from octavo.engine.overview import Recent, block_map, live_sequences
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.state import SequenceState
from octavo.engine.scheduler.step import PendingStep
from octavo.engine.timelines import Timelines
from octavo.engine.timing import StepTiming

GRAMMAR_WAIT_S = 0.01
"""How long a step that has nothing to compute waits for a grammar, and new requests for it."""


@dataclass(slots=True)
class _Submitted:
    ticket: Ticket
    plan: StepPlan
    started: float
    schedule_s: float
    sampled: bool


class EngineCore:
    """All calls come from one thread.

    With an executor that takes several plans in flight, step N + 1 is planned and submitted before
    step N is collected; a step that needs masks samples only after the one before it is committed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        host_processors: Sequence[HostLogitsProcessor] = (),
        observers: Sequence[tuple[str, Observer]] = (),
        report: Any = None,
        resolved: Any = None,
        clock: Callable[[], float] = time.monotonic,
        timelines: int = 0,
        grammars: Grammars | None = None,
        owners: Owners | None = None,
        plugin_times: PluginTimes | None = None,
    ) -> None:
        self._plugin_times = plugin_times
        self._owners = owners or Owners()
        self.grammars = grammars or Grammars(None)
        if grammars is not None:
            masker = GrammarProcessor(grammars.of, scheduler.limits.vocab_size)
            host_processors = (*host_processors, masker)
        self.scheduler, self.executor = scheduler, executor
        self.report, self.resolved = report, resolved
        self.clock = clock
        self.timing = StepTiming()
        self.observers = Observers(observers)
        self._masks = HostMasks(
            host_processors,
            scheduler.limits.vocab_size,
            self._end,
            label=self._owners.label,
        )
        self._submitted: deque[_Submitted] = deque()
        self._forward_version = executor.forward_version
        self._closed = False
        self._recent = Recent()
        self._timelines = Timelines(timelines, scheduler, clock)
        scheduler.live.on_finished = self._tell_finished

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestError` when it can never run."""
        with self._owners:
            if request.sampling.structured_outputs is None:
                self._queue(request)
            else:
                self.scheduler.check(request)
                self.grammars.add(request)

    def _queue(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self._timelines.added(request)

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        """End these sequences; those that have ended already are ignored. reason: what they end
        by, `abort`, or `stop` where the front end found a stop string."""
        with self._owners:
            for handle in self.grammars.abort(handles):
                self.scheduler.refuse(handle, reason)
            self.scheduler.abort(handles, reason)

    def has_work(self) -> bool:
        """Whether `step` would do anything, or a grammar is being compiled for a request."""
        return bool(self._submitted) or self.scheduler.has_work() or self.grammars.pending > 0

    def step(self) -> EngineOutputs | None:
        """Advance by one step and return what it produced, or None when there was nothing to do.

        Raises `PluginFault`, which names the implementation, for an exception in one of those that
        the whole engine depends on.
        """
        with self._owners:
            return self._step()

    def _step(self) -> EngineOutputs | None:
        if self.grammars.pending:
            self._take_compiled()
        while len(self._submitted) < self.executor.max_in_flight:
            if self._submitted and not self._submitted[-1].sampled:
                break  # the next forward pass needs its tokens
            if not self._submit():
                break
        if self._submitted:
            return self._collect()
        outputs = self.scheduler.take_outputs()
        if outputs is not None and self.observers.want_states:
            self._tell_state()
        return outputs

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar has come; wait a little where there is nothing else."""
        busy = self._submitted or self.scheduler.has_work()
        for request, refusal in self.grammars.take(0.0 if busy else GRAMMAR_WAIT_S):
            if refusal is None:
                self._queue(request)
            else:
                self.scheduler.refuse(request.handle, "error", refusal)

    def _submit(self) -> bool:
        started = time.perf_counter()
        version = self.executor.forward_version
        if version != self._forward_version:
            self._forward_version = version
            self.scheduler.forward_changed(version)
        plan = self.scheduler.plan()
        if self._timelines.active:
            self._timelines.planned(plan)
        if plan is None:
            return False
        plan.needs_mask = self._masks.follow(plan)
        schedule_s = time.perf_counter() - started
        ticket = self.executor.submit(plan)
        self._submitted.append(_Submitted(ticket, plan, started, schedule_s, sampled=False))
        if not plan.needs_mask or len(self._submitted) == 1:
            self._sample(self._submitted[-1])
        self.scheduler.catch_up()
        return True

    def _sample(self, step: _Submitted) -> None:
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
        if self._submitted and not self._submitted[0].sampled:
            self._sample(self._submitted[0])
        commit_s = time.perf_counter() - started
        self.timing.record(
            step.schedule_s, result.prepare_s, result.forward_s, result.sample_s, commit_s
        )
        if self.observers.want_steps:
            self._tell_step(step, result, outputs, record, commit_s)
        return outputs

    def _end(self, handle: int, reason: str, error: str | None, code: str | None) -> None:
        self.scheduler.abort([handle], reason, error, code)

    def _tell_step(
        self,
        step: _Submitted,
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
                num_waiting=scheduler.num_waiting + self.grammars.pending,
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

    def _tell_state(self) -> None:
        scheduler = self.scheduler
        self.observers.state(
            StateRecord(
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting + self.grammars.pending,
                num_swapped=scheduler.num_swapped,
                kv=scheduler.cache.stats(),
            )
        )

    def _tell_finished(self, sequence: SequenceState, reason: str) -> None:
        if sequence.request.sampling.structured_outputs is not None:
            self.grammars.forget(sequence.handle)
        if self._timelines.active:
            self._timelines.finished(sequence, reason)
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
        self._recent.add(record)
        self.observers.request(record)

    def overview(self, cells: int = 1024, requests: int = 32) -> dict[str, Any]:
        """What is going on, for people. now: on the engine's clock, as all times are. blocks: see
        `block_map`, in at most `cells` cells. live, recent: at most `requests` sequences that run
        or wait, and as many that have ended, the newest first."""
        now = self.clock()
        return {
            "now": now,
            "blocks": block_map(self.scheduler.kv, cells),
            "live": live_sequences(self.scheduler, now, requests),
            "recent": self._recent.newest(requests),
        }

    def timeline(self, request_id: str) -> list[dict[str, Any]] | None:
        """What happened to a request (see `Timelines`); None when nothing was recorded of it."""
        return self._timelines.get(request_id)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while blocks are in use."""
        return self.scheduler.kv.reset_prefix_cache()

    def metrics(self) -> dict[str, Any]:
        """Step phases and the scheduler's state, as plain data."""
        stats = self.scheduler.stats()
        return {
            **self.timing.summary(),
            **{name: getattr(stats, name) for name in stats.__struct_fields__},
            "kv_cache_usage": self.scheduler.kv.stats().usage,
            "observer_failures": dict(self.observers.num_failures),
            "plugin_times": self._plugin_times.summary() if self._plugin_times else {},
        }

    def close(self) -> None:
        """Stop the workers. More than one call is harmless."""
        if not self._closed:
            self._closed = True
            self.observers.close()
            self.grammars.close()
            self.executor.close()
