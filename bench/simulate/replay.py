"""The replay: requests arrive on a virtual clock, the engine does what it does when it serves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from octavo.bench.simulate.collect import Collector
from octavo.bench.simulate.setup import SimulatedEngine
from octavo.bench.simulate.traces import Prompts, TraceRequest
from octavo.bench.slo import Slo
from octavo.core.errors import RequestError
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


class Replay:
    """One run of a trace. concurrency: None replays arrival times; else a request is sent when
    fewer than so many are unfinished, and the trace's times are ignored."""

    def __init__(
        self, engine: SimulatedEngine, slo: Slo | None = None, concurrency: int | None = None
    ) -> None:
        self.engine, self.collector = engine, Collector(slo or Slo(), engine.core.scheduler)
        self._concurrency = concurrency
        self._prompts = Prompts(engine.limits.vocab_size)
        self._number = 0

    def run(
        self, requests: Iterable[TraceRequest], progress: Callable[[int], object] | None = None
    ) -> Collector:
        """Until every request has ended. progress: told how many requests were read, now and
        then."""
        source = iter(requests)
        core, clock = self.engine.core, self.engine.clock
        pending = next(source, None)
        while pending is not None or core.has_work():
            pending = self._send(pending, source)
            if core.has_work():
                self._step()
            elif pending is not None:
                clock.advance_to(pending.arrival)
            if progress is not None:
                progress(self._number)
        return self.collector

    def _send(
        self, pending: TraceRequest | None, source: Iterator[TraceRequest]
    ) -> TraceRequest | None:
        """Submit what has arrived; the first request that has not."""
        now = self.engine.clock.now
        while pending is not None:
            if self._concurrency is None:
                if pending.arrival > now:
                    break
            elif self.collector.num_live >= self._concurrency:
                break
            self._submit(pending, now if self._concurrency is not None else pending.arrival)
            pending = next(source, None)
        return pending

    def _submit(self, request: TraceRequest, arrival: float) -> None:
        handle = self._number
        self._number += 1
        total = request.num_prompt + request.num_output
        if total > self.engine.limits.max_model_len:
            self.collector.refused(request, "longer than max_model_len")
            return
        engine_request = EngineRequest(
            handle=handle,
            request_id=f"trace-{handle}",
            token_ids=self._prompts.tokens(request, handle),
            sampling=SAMPLING,
            seed=handle,
            max_tokens=request.num_output,
            priority=request.priority,
            user=request.user,
        )
        try:
            self.engine.core.add(engine_request)
        except RequestError:
            self.collector.refused(request, "larger than the KV cache")
            return
        self.collector.submitted(handle, request, arrival)

    def _step(self) -> None:
        executor, clock = self.engine.executor, self.engine.clock
        steps, before = executor.num_steps, clock.now
        outputs = self.engine.core.step()
        if outputs is None:
            raise RuntimeError("the scheduler has work and plans nothing")
        shape = executor.last
        computed = (0, 0)
        if executor.num_steps > steps and shape is not None:
            computed = shape.prefill, shape.decodes
        self.collector.step(outputs, clock.now, clock.now - before, *computed)


def result(replay: Replay, name: str) -> dict[str, Any]:
    """What came out of a replay, as plain data. Times are seconds of the virtual clock."""
    engine, found = replay.engine, replay.collector
    core, executor = engine.core, engine.executor
    stats, kv = core.scheduler.stats(), core.scheduler.kv.stats()
    refused = sum(found.num_refused.values())
    total = found.num_served + found.num_failed + refused
    seconds = max(found.end, 1e-12)
    report = core.report
    return {
        "config": name,
        "requests": {
            "total": total,
            "served": found.num_served,
            "refused": refused,
            "refused_because": found.num_refused,
            "truncated": found.num_truncated,
            "failed": found.num_failed,
        },
        "duration_s": found.end,
        "busy_fraction": executor.busy_s / seconds,
        "num_steps": executor.num_steps,
        "requests_per_s": found.num_served / seconds,
        "output_tokens_per_s": found.output_tokens / seconds,
        "total_tokens_per_s": (found.prompt_tokens + found.output_tokens) / seconds,
        "prompt_tokens": found.prompt_tokens,
        "output_tokens": found.output_tokens,
        "computed_tokens": found.computed_tokens,
        "ttft_s": found.ttft.summary(),
        "itl_s": found.itl.summary(),
        "tpot_s": found.tpot.summary(),
        "e2e_s": found.e2e.summary(),
        "goodput": {
            "slo": {key: value for key, value in vars(found.slo).items() if value is not None},
            "requests_per_s": found.num_good / seconds,
            "fraction": found.num_good / total if total else 0.0,
        },
        "prefix_hit_rate": found.prefix_hit_rate,
        "scheduler": {name: getattr(stats, name) for name in stats.__struct_fields__},
        "num_preemptions": stats.num_preemptions,
        "num_preempted_requests": found.num_preempted_requests,
        "copied_tokens": executor.copied,
        "swapped_tokens": executor.swapped,
        "kv": {
            "num_blocks": kv.num_blocks,
            "block_size": engine.limits.block_size,
            "mean_usage": found.kv_seconds / seconds,
            "peak_usage": found.peak_kv_usage,
        },
        "peak_running": found.peak_running,
        "peak_waiting": found.peak_waiting,
        "fairness": found.fairness(),
        "curves": {"ttft_s": found.ttft.curve(), "itl_s": found.itl.curve()},
        "series": found.series.as_dict(),
        "engine": None if report is None else report.as_dict(),
    }
