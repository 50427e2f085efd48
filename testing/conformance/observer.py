"""What every observer promises."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts.kv_cache_manager import KVStats
from octavo.core.contracts.observer import (
    Observer,
    ObserverContext,
    PreemptionRecord,
    RequestRecord,
    StateRecord,
    StepRecord,
)
from octavo.testing.conformance.base import ConformanceSuite, executed_lines
from octavo.testing.conformance.workload import SITUATIONS, run_situation

REPORT: dict[str, Any] = {
    "model": {"source": "tiny", "architecture": "LlamaForCausalLM"},
    "plugins": [],
    "capacity": {"num_blocks": 100, "block_size": 16},
}


def step_record(step: int = 1, **changes: Any) -> StepRecord:
    """A step with a decode, a prefill chunk and a preemption."""
    values: dict[str, Any] = {
        "step": step,
        "started": 10.0 + step,
        "schedule_s": 1e-4,
        "prepare_s": 2e-5,
        "forward_s": 2e-2,
        "sample_s": 1e-3,
        "commit_s": 1e-4,
        "num_running": 2,
        "num_waiting": 1,
        "num_tokens": 17,
        "num_prefill": 16,
        "num_sampled": 1,
        "num_preempted": 1,
        "kv": KVStats(100, 60, 20, 200, 80),
        "preemptions": (
            PreemptionRecord(7, "seven", "recompute", 12, 1, "the only way", (8, "blocks")),
        ),
    }
    return StepRecord(**{**values, **changes})


def request_record(handle: int = 1, **changes: Any) -> RequestRecord:
    """A request that ended as it should."""
    values: dict[str, Any] = {
        "request_id": f"request-{handle}",
        "handle": handle,
        "arrival": 1.0,
        "admitted": 1.5,
        "first_token": 2.0,
        "finished": 3.0,
        "num_prompt": 16,
        "num_output": 5,
        "num_cached": 0,
        "num_preemptions": 0,
        "finish_reason": "stop",
    }
    return RequestRecord(**{**values, **changes})


class ObserverSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (an `Observer` for the context)."""

    kind = "observer"

    def observer(self) -> Observer:
        """The observer under test."""
        made = self.make(ObserverContext(REPORT))
        assert isinstance(made, Observer), f"make returned {type(made).__name__}"
        return made

    def test_it_sees_something(self) -> None:
        """At least one event is overridden."""
        observer = self.observer()
        seen = [
            name
            for name in ("on_step", "on_state", "on_request")
            if getattr(type(observer), name) is not getattr(Observer, name)
        ]
        observer.close()
        assert seen, "it overrides none of on_step, on_state and on_request"

    def test_every_step_is_taken(self) -> None:
        """Steps with nothing in them, the first one, huge ones: none raises."""
        observer = self.observer()
        empty = dict.fromkeys(
            ("num_running", "num_waiting", "num_tokens", "num_prefill", "num_sampled"), 0
        )
        for record in (
            step_record(0, **empty, kv=KVStats(0, 0, 0, 0, 0), preemptions=()),
            step_record(),
            step_record(2, forward_s=0.0, schedule_s=0.0),
            step_record(3, num_running=4096, num_tokens=1 << 20, swapped_in=(1, 2), num_copies=8),
            step_record(3),
        ):
            observer.on_step(record)
        observer.close()

    def test_every_state_is_taken(self) -> None:
        """An empty engine and a full one: neither raises."""
        observer = self.observer()
        observer.on_state(StateRecord(0, 0, 0, KVStats(0, 0, 0, 0, 0)))
        observer.on_state(StateRecord(256, 10_000, 7, KVStats(100, 0, 0, 5000, 4000)))
        observer.close()

    def test_every_end_is_taken(self) -> None:
        """Requests that were aborted while they waited, failed, or had no output: none raises."""
        observer = self.observer()
        for record in (
            request_record(),
            request_record(2, admitted=None, first_token=None, num_output=0, finish_reason="abort"),
            request_record(3, first_token=None, num_output=0, finish_reason="error"),
            request_record(4, finish_reason="length", num_preemptions=3, num_cached=16),
            request_record(4, finished=1.0, admitted=1.0, first_token=1.0),
            request_record(5, request_id='ü \n"quoted" <b>'),
        ):
            observer.on_request(record)
        observer.close()

    def test_it_can_be_closed_at_any_time(self) -> None:
        """close works before the first event."""
        self.observer().close()

    def test_two_of_them_do_not_disturb_each_other(self) -> None:
        """Two engines in one process may each have one."""
        first, second = self.observer(), self.observer()
        first.on_step(step_record())
        second.on_step(step_record())
        first.close()
        second.on_request(request_record())
        second.close()

    def test_events_cost_the_same_however_many_came(self) -> None:
        """An event executes no more Python after 3,000 events than after ten."""
        observer, cost = self.observer(), {}
        events = 0
        for until in (10, 3_000):
            while events < until:
                observer.on_step(step_record(events))
                observer.on_request(request_record(events))
                events += 1
            cost[until] = executed_lines(lambda: observer.on_step(step_record(until)))  # noqa: B023
        observer.close()
        assert cost[3_000] <= 2 * cost[10] + 100, f"lines executed by events: {cost}"

    def test_engine_with_it_works_as_without(self) -> None:
        """In an engine it raises nothing, and every request gets the tokens it would have alone."""
        for where in SITUATIONS:
            observer = self.observer()
            engine = run_situation(where, 1, observers=[("under test", observer)])
            failures = engine.metrics()["observer_failures"]
            observer.close()
            assert not failures, f"{where.name}: it raised {failures}"
