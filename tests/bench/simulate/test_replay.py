"""The replay: arithmetic of its figures, refusals, determinism, and memory that stays bounded."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from octavo.bench.simulate.replay import Replay, result
from octavo.bench.simulate.setup import SimulatedEngine
from octavo.bench.simulate.traces import TraceRequest, shaped, synthetic
from octavo.bench.slo import Slo
from octavo.core.errors import CapacityError, ConfigError, PluginError
from octavo.core.registry import Registry
from octavo.frontend.config import load_config
from octavo.plugins.executors.cost_model import StepShape

MakeEngine = Callable[..., SimulatedEngine]


def replayed(
    engine: SimulatedEngine, requests: Iterable[TraceRequest], **options: Any
) -> dict[str, Any]:
    replay = Replay(engine, **options)
    replay.run(requests)
    assert not engine.core.has_work()
    engine.core.scheduler.kv.check()
    return result(replay, "test")


def cost_of(engine: SimulatedEngine) -> Callable[[StepShape], float]:
    return engine.executor._simulation.cost.seconds


def test_one_request_takes_what_its_steps_take(make_engine: MakeEngine) -> None:
    engine = make_engine()
    found = replayed(engine, [TraceRequest(0.0, 3000, 3)])
    cost = cost_of(engine)
    first = cost(StepShape(2048, 0, 0, 2048, 2048 * 2049 // 2))
    pairs = 3000 * 3001 // 2 - 2048 * 2049 // 2
    second = cost(StepShape(952, 0, 1, 3000, pairs))
    decodes = [cost(StepShape(0, 1, 1, context, 0)) for context in (3001, 3002)]
    assert found["ttft_s"]["mean"] == pytest.approx(first + second)
    assert found["itl_s"]["mean"] == pytest.approx(sum(decodes) / 2)
    assert found["duration_s"] == pytest.approx(first + second + sum(decodes))
    assert found["num_steps"] == 4
    assert found["computed_tokens"] == 3002
    assert found["output_tokens"] == 3


def test_time_passes_between_requests(make_engine: MakeEngine) -> None:
    requests = [TraceRequest(0.0, 10, 1), TraceRequest(100.0, 10, 1)]
    found = replayed(make_engine(), requests)
    assert 100 < found["duration_s"] < 101
    assert found["busy_fraction"] < 0.001
    assert found["ttft_s"]["max"] < 0.1
    assert found["peak_running"] <= 1


def test_waiting_counts_from_the_arrival_in_the_trace(make_engine: MakeEngine) -> None:
    engine = make_engine(scheduler__max_num_seqs=1)
    engine.core.close()
    engine = make_engine()
    long = cost_of(engine)(StepShape(2000, 0, 1, 2000, 1000 * 2001))
    late = TraceRequest(long / 2, 10, 1)  # arrives while the first step runs
    found = replayed(engine, [TraceRequest(0.0, 2000, 1), late])
    own = cost_of(engine)(StepShape(10, 0, 1, 10, 55))
    assert found["ttft_s"]["mean"] == pytest.approx((long + long / 2 + own) / 2)


def test_closed_loop_keeps_so_many_requests_unfinished(make_engine: MakeEngine) -> None:
    requests = [TraceRequest(1e6 * i, 50, 5) for i in range(40)]
    one = replayed(make_engine(), requests, concurrency=1)
    eight = replayed(make_engine(), requests, concurrency=8)
    assert (one["peak_running"], eight["peak_running"]) == (1, 8)
    assert one["requests"]["served"] == eight["requests"]["served"] == 40
    assert eight["duration_s"] < one["duration_s"] < 1.0


def test_what_does_not_fit_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine(model__max_model_len=20_000, kv_cache__num_blocks=1000)
    lengths = [(19_990, 10), (19_991, 10), (16_100, 5), (15_000, 100), (5, 20_000)]
    found = replayed(engine, [TraceRequest(0.0, p, o) for p, o in lengths], concurrency=1)
    assert found["requests"]["refused_because"] == {
        "longer than max_model_len": 2,
        "larger than the KV cache": 2,
    }
    assert found["requests"]["served"] == 1
    assert found["requests"]["total"] == 5
    assert found["goodput"]["fraction"] == pytest.approx(1 / 5)


def test_an_output_that_the_pool_cuts_short_is_told(make_engine: MakeEngine) -> None:
    found = replayed(make_engine(kv_cache__num_blocks=10), [TraceRequest(0.0, 100, 500)])
    assert found["requests"]["truncated"] == 1
    assert found["output_tokens"] == 60


def test_goodput_counts_requests_that_keep_every_target(make_engine: MakeEngine) -> None:
    requests = list(synthetic(200, 400.0, 300, 20))
    free = replayed(make_engine(), requests)
    assert free["goodput"]["fraction"] == 1.0
    median = free["ttft_s"]["p50"]
    half = replayed(make_engine(), requests, slo=Slo(ttft=median))
    assert half["goodput"]["fraction"] == pytest.approx(0.5, abs=0.011)
    assert half["goodput"]["slo"] == {"ttft": median}
    none = replayed(make_engine(), requests, slo=Slo(ttft=median, itl=1e-9))
    one_token = sum(r.num_output == 1 for r in requests) / 200
    assert none["goodput"]["fraction"] <= one_token


def test_a_replay_is_deterministic(make_engine: MakeEngine) -> None:
    requests = list(shaped(synthetic(300, 500.0, 400, 60), users=3))
    first, second = (replayed(make_engine(kv_cache__num_blocks=300), requests) for _ in range(2))
    assert first["num_preemptions"] > 0
    for found in (first, second):
        del found["engine"]["phases"]
    assert first == second


def test_preemption_loses_no_token(make_engine: MakeEngine) -> None:
    requests = list(synthetic(100, 1e6, 200, 200, seed=4))
    found = replayed(make_engine(kv_cache__num_blocks=200), requests)
    assert found["num_preemptions"] > 0
    assert 0 < found["num_preempted_requests"] <= found["num_preemptions"]
    served = [r for r in requests if r.num_prompt + 1 <= 200 * 16]
    fitting = sum(min(r.num_output, 200 * 16 - r.num_prompt) for r in served)
    assert found["output_tokens"] == fitting
    assert found["kv"]["peak_usage"] > 0.9


def test_steps_in_flight_change_nothing_but_when_they_are_planned(make_engine: MakeEngine) -> None:
    requests = list(synthetic(150, 300.0, 200, 30))
    kind = load_config(mapping={"executor": {"kind": "local"}}).executor.kind
    assert kind.name == "local"
    one = make_engine()
    options = one.core.resolved.config.executor.kind.options
    two = make_engine(executor__kind={"name": "simulated", "in_flight": 2, **options})
    found, other = replayed(one, requests), replayed(two, requests)
    assert found["output_tokens"] == other["output_tokens"]
    assert other["duration_s"] == pytest.approx(found["duration_s"], rel=0.1)


def test_users_are_told_apart(make_engine: MakeEngine) -> None:
    requests = shaped(synthetic(120, 200.0, 100, 10), users=4)
    fairness = replayed(make_engine(), requests)["fairness"]
    assert fairness["num_users"] == 4
    assert sum(user["requests"] for user in fairness["users"].values()) == 120
    assert 0.25 <= fairness["jain_speed"] <= 1.0
    assert all(user["mean_ttft_s"] <= user["max_ttft_s"] for user in fairness["users"].values())


def test_every_part_that_serves_can_be_simulated(
    make_engine: MakeEngine, registry: Registry
) -> None:
    requests = list(shaped(synthetic(40, 1e4, 150, 80), users=2))
    for kind, key in (
        ("scheduler_policy", "scheduler__policy"),
        ("kv_cache_manager", "kv_cache__manager"),
        ("preemption_policy", "preemption__policy"),
    ):
        for name in registry.providers(kind):
            choice = ["priority", "fair"] if name == "composed" else name
            engine = make_engine(kv_cache__num_blocks=150, **{key: choice})
            found = replayed(engine, requests)
            assert found["requests"]["served"] == 40, (kind, name)
            assert found["output_tokens"] == sum(r.num_output for r in requests), (kind, name)
            assert found["scheduler"]["num_preemptions"] == found["num_preemptions"] > 0


def test_a_slower_accelerator_takes_longer(make_engine: MakeEngine) -> None:
    requests = list(synthetic(60, 100.0, 500, 30))
    times = []
    for name in ("h200", "h100", "l40s", "l4"):
        engine = make_engine()
        options = dict(engine.core.resolved.config.executor.kind.options, accelerator=name)
        engine = make_engine(executor__kind={"name": "simulated", **options})
        times.append(replayed(engine, requests, concurrency=16)["duration_s"])
    assert times == sorted(times)
    assert times[0] < times[-1] / 1.5


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("local", "expected {name: simulated, accelerator: ...}, got 'local'"),
        ({"name": "simulated", "accelerator": "h100"}, "expected keys of a config.json"),
        ({"name": "simulated", "model": {"vocab_size": 5}}, "max_model_len: required: config.json"),
        (
            {"name": "simulated", "model": {"max_position_embeddings": 64}},
            "expected one of `accelerator` and `fitted`",
        ),
        ({"name": "simulated", "fitted": "no.json", "model": "no"}, "cannot read 'no'"),
        ({"name": "simulated", "accelerator": "h1000", "model": {}}, "did you mean 'h100'"),
    ],
)
def test_mistakes_in_the_configuration(make_engine: MakeEngine, kind: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(executor__kind=kind)
    assert message in str(caught.value)


def test_unknown_options_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(PluginError, match="acelerator"):
        make_engine(executor__kind={"name": "simulated", "acelerator": "h100"})


def test_a_model_that_does_not_fit(make_engine: MakeEngine, registry: Registry) -> None:
    engine = make_engine()
    model = dict(engine.core.resolved.config.executor.kind.options["model"])
    model |= {"hidden_size": 16384, "num_hidden_layers": 126, "intermediate_size": 53248}
    kind = {"name": "simulated", "accelerator": "h100", "model": model}
    with pytest.raises(CapacityError, match=r"no memory is left for the KV cache: 0\.9 of 79"):
        make_engine(executor__kind=kind, kv_cache__num_blocks=None)


def test_with_a_real_clock_the_executor_sleeps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    from octavo.bench.simulate.setup import simulated_resolution
    from octavo.engine.builder import build_engine

    engine = make_engine()
    registry = Registry.discover()
    config = engine.core.resolved.config
    core = build_engine(simulated_resolution(config, registry), registry)
    served = SimulatedEngine(core, engine.clock)
    Replay(served).run([TraceRequest(0.0, 10, 4)])
    assert len(slept) == 4
    assert sum(slept) == pytest.approx(served.executor.busy_s)


@pytest.mark.parametrize(
    "count", [1000, pytest.param(15_000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]
)
def test_finished_requests_are_forgotten(make_engine: MakeEngine, count: int) -> None:
    """After 2 N and 3 N requests as many objects live as after N."""
    engine = make_engine(kv_cache__num_blocks=200)
    replay = Replay(engine)
    alive: list[int] = []

    def watch(read: int) -> None:
        if read >= count * (len(alive) + 1):
            gc.collect()
            alive.append(len(gc.get_objects()))

    replay.run(shaped(synthetic(3 * count + 1, 3000.0, 12, 4), users=5), watch)
    assert len(alive) == 3
    assert max(alive) - alive[0] < 500
    assert replay.collector.num_served == 3 * count + 1
    assert not engine.core.scheduler.sequences
