"""Runs a workload on an engine in this process, on its own clock, real or virtual."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from octavo.bench.load.answers import Answer
from octavo.bench.simulate.statistics import Series
from octavo.bench.workloads.calls import Call, Dispatcher
from octavo.core.errors import RequestError
from octavo.core.messages import EngineOutputs, EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.clock import VirtualClock
from octavo.engine.core import EngineCore
from octavo.engine.scheduler.scheduler import Scheduler

SERIES = ("kv_usage", "running", "waiting")


class Encode(Protocol):
    """From a call's prompt to token ids."""

    def __call__(self, call: Call) -> Sequence[int]: ...


@dataclass
class EngineRun:
    """answers: in the order of the calls. seconds: by the engine's clock. kv_mean, kv_peak: share
    of the pool's blocks that sequences held. phases: as `StepTiming.summary`. series: over time."""

    answers: list[Answer]
    seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    kv_mean: float = 0.0
    kv_peak: float = 0.0
    phases: dict[str, Any] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)


def token_ids_only(call: Call) -> Sequence[int]:
    """For workloads of token ids."""
    assert call.token_ids is not None, "a text needs a tokenizer"
    return call.token_ids


class EngineDriver:
    """Sends calls to an engine and steps it until they have ended, over and over.

    sampling: of every request, `max_tokens` aside; default greedy, past any end of sequence.
    """

    def __init__(self, engine: EngineCore, encode: Encode = token_ids_only) -> None:
        self.engine, self._encode = engine, encode
        self._handle = 1 << 20
        clock = engine.clock
        if isinstance(clock, VirtualClock):
            self._wait_until: Callable[[float], None] = clock.advance_to
        else:
            self._wait_until = lambda moment: time.sleep(max(0.0, moment - clock()))

    def run(
        self,
        calls: Sequence[Call],
        max_concurrency: int | None = None,
        on_tokens: Callable[[int], object] = lambda count: None,
    ) -> EngineRun:
        """Until every call has ended. A request that the engine refuses is an error."""
        engine, clock = self.engine, self.engine.clock
        first = self._handle
        self._handle += len(calls)
        before = engine.scheduler.stats()
        engine.timing.reset()
        begin = clock()
        dispatcher = Dispatcher(calls, max_concurrency)
        record = _Record(EngineRun([Answer(0.0) for _ in calls]), engine.scheduler, first, begin)
        reached = 0.0  # begin + until - begin may round to less than until
        while not dispatcher.done:
            for index in dispatcher.due(max(reached, clock() - begin)):
                self._send(calls[index], first + index, dispatcher.due_at[index], record)
            if engine.has_work():
                outputs = engine.step()
                if outputs is not None:
                    on_tokens(record.step(outputs, clock()))
            elif not record.newly_ended:
                until = dispatcher.next_time()
                assert until is not None, "calls are left and nothing will come of them"
                self._wait_until(begin + until)
                reached = until
            for index in record.take_ended():
                dispatcher.ended(index, clock() - begin)
        return record.finish(clock(), engine, before)

    def _send(self, call: Call, handle: int, due: float, record: _Record) -> None:
        answer = record.run.answers[handle - record.first]
        answer.sent = due
        try:
            ids = self._encode(call)
            answer.num_prompt = len(ids)
            self._check(len(ids) + call.max_tokens)
            self.engine.add(
                EngineRequest(
                    handle=handle,
                    request_id=f"bench-{handle}",
                    token_ids=np.asarray(ids, np.int32),
                    sampling=SamplingParams(
                        temperature=0.0,
                        max_tokens=call.max_tokens,
                        ignore_eos=True,
                        detokenize=False,
                    ),
                    seed=handle,
                    max_tokens=call.max_tokens,
                    priority=call.priority,
                    user=call.user,
                )
            )
        except RequestError as error:
            record.fail(handle - record.first, str(error), due)

    def _check(self, total: int) -> None:
        limit = self.engine.scheduler.limits.max_model_len
        if total > limit:
            raise RequestError(f"{total} tokens in and out are more than max_model_len {limit}")


class _Record:
    """Takes in what the steps of one run produce."""

    def __init__(self, run: EngineRun, scheduler: Scheduler, first: int, begin: float) -> None:
        self.run, self.first, self.begin = run, first, begin
        self._scheduler = scheduler
        self.newly_ended: list[int] = []
        self._series = Series(SERIES, capacity=256, width=0.05)
        self._last = 0.0
        self._kv_seconds = 0.0

    def step(self, outputs: EngineOutputs, moment: float) -> int:
        """One step's outputs; the number of tokens in them."""
        now = moment - self.begin
        answers = self.run.answers
        width = outputs.token_ids.shape[1] if outputs.token_ids.ndim == 2 else 1
        counts = outputs.counts
        total = 0
        for place, handle in enumerate(outputs.handles.tolist()):
            count = width if counts is None else int(counts[place])
            if count:
                answer = answers[handle - self.first]
                answer.times.append(now)
                answer.counts.append(count)
                total += count
        for handle, cached in outputs.cached.items():
            answers[handle - self.first].num_cached = cached
        for finish in outputs.finished:
            index = finish.handle - self.first
            answer = answers[index]
            answer.ended, answer.finish = now, finish.reason
            answer.num_output = sum(answer.counts)
            if finish.reason in ("error", "abort"):
                answer.error = finish.error or finish.reason
            self.newly_ended.append(index)
        self._state(now)
        return total

    def _state(self, now: float) -> None:
        scheduler, seconds = self._scheduler, now - self._last
        if seconds <= 0:
            return
        usage = scheduler.kv.stats().usage
        self.run.kv_peak = max(self.run.kv_peak, usage)
        self._kv_seconds += usage * seconds
        self._series.add(now, seconds, (usage, scheduler.num_running, scheduler.num_waiting))
        self._last = now

    def fail(self, index: int, message: str, now: float) -> None:
        answer = self.run.answers[index]
        answer.error, answer.ended = message, now
        self.newly_ended.append(index)

    def take_ended(self) -> list[int]:
        ended, self.newly_ended = self.newly_ended, []
        return ended

    def finish(self, moment: float, engine: EngineCore, before: Any) -> EngineRun:
        run, after = self.run, engine.scheduler.stats()
        run.seconds = moment - self.begin
        timing = engine.timing.summary()
        run.num_steps, run.phases = timing["num_steps"], timing["phases"]
        run.num_preemptions = after.num_preemptions - before.num_preemptions
        run.prefix_queries = after.prefix_queries - before.prefix_queries
        run.prefix_hits = after.prefix_hits - before.prefix_hits
        run.kv_mean = self._kv_seconds / max(run.seconds, 1e-12)
        run.series = self._series.as_dict()
        return run
