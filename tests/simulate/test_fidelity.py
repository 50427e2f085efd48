"""The simulator, fitted to one run of the real engine, against another run of it.

Method: both runs are made twice, in turn. Seconds are those of the processor (others may use the
machine), put right for its speed, which is measured after every step by a fixed piece of work, and
of the two times of each step the smaller one counts. What is left is what the engine costs.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench.simulate.replay import Replay
from octavo.bench.simulate.setup import simulated_engine
from octavo.bench.simulate.traces import TraceRequest
from octavo.bench.step_recorder import StepRecorder
from octavo.bench.throughput import run_requests
from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.config.loading import load_config
from octavo.core.config.resolve import resolve
from octavo.core.engine.builder import build_engine
from octavo.core.engine.core import EngineCore
from octavo.core.registry import Registry

SHAPES = {"fit": Shape(64, 24, 16), "check": Shape(64, 32, 24)}


class SteadyClock:
    """Seconds of the processor as they would be at the speed that the machine had at first. Each
    call times a fixed product of matrices, as the model's are, and does not count it."""

    def __init__(self) -> None:
        self._weight, self._rows = torch.ones(576, 1536), torch.ones(16, 576)
        self._now = 0.0
        self._nominal = self._last = self._speed()
        self._since = time.process_time()

    def _speed(self) -> float:
        times = []
        for _ in range(5):
            started = time.process_time()
            for _ in range(4):
                self._rows @ self._weight
            times.append(time.process_time() - started)
        return sorted(times)[2]

    def __call__(self) -> float:
        elapsed = time.process_time() - self._since
        before, self._last = self._last, self._speed()
        self._now += elapsed * 2 * self._nominal / (before + self._last)
        self._since = time.process_time()
        return self._now


def run(
    engine: EngineCore, shape: Shape, first_handle: int, clock: SteadyClock
) -> tuple[dict[str, list[float]], int]:
    """Steps of a run with their seconds, and how many preemptions it saw."""
    prompts = random_prompts(shape, engine.scheduler.limits.vocab_size, seed=shape.input_len)
    before = engine.scheduler.num_preemptions
    recorder = StepRecorder(engine.executor, engine.scheduler.limits.max_num_seqs, clock)
    engine.executor = recorder
    run_requests(engine, list(requests(prompts, shape.output_len, first_handle)))
    engine.executor = recorder.executor
    assert engine.reset_prefix_cache()
    return recorder.records(), engine.scheduler.num_preemptions - before


def quickest(runs: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Runs of the same steps as one: of each step the least seconds."""
    columns = [{**steps, "seconds": None} for steps in runs]
    assert all(each == columns[0] for each in columns), "the runs differ in what they computed"
    seconds = [min(times) for times in zip(*(steps["seconds"] for steps in runs), strict=True)]
    return {**runs[0], "seconds": seconds}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fitted_simulation_does_what_the_engine_does(demo_model: str, tmp_path: Path) -> None:
    registry = Registry.discover()
    mapping: dict[str, Any] = {
        "model": {"source": demo_model, "max_model_len": 256},
        "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 128},
        "kv_cache": {"num_blocks": 96},
        "executor": {"device": "cpu", "num_threads": 1},
    }
    engine = build_engine(resolve(load_config(mapping=mapping), registry), registry)
    clock = SteadyClock()
    measured: dict[str, list[dict[str, list[float]]]] = {name: [] for name in SHAPES}
    preemptions: dict[str, set[int]] = {name: set() for name in SHAPES}
    try:
        run(engine, Shape(4, 24, 4), 10_000, clock)  # to warm up
        for repeat in range(2):
            for number, (name, shape) in enumerate(SHAPES.items()):
                steps, count = run(engine, shape, 1000 * (2 * repeat + number + 1), clock)
                measured[name].append(steps)
                preemptions[name].add(count)
        startup = engine.report.as_dict()
    finally:
        engine.close()
    file = tmp_path / "throughput.json"
    file.write_text(json.dumps({"steps": quickest(measured["fit"]), "startup": startup}))
    mapping["executor"] |= {"kind": {"name": "simulated", "fitted": str(file)}}
    simulated = simulated_engine(load_config(mapping=mapping), registry)
    replay = Replay(simulated)
    shape = SHAPES["check"]
    replay.run(TraceRequest(0.0, shape.input_len, shape.output_len) for _ in range(64))
    steps = quickest(measured["check"])
    real, found = sum(steps["seconds"]), replay.collector.end
    print(f"real {real:.2f} s, simulated {found:.2f} s, {preemptions['check']} preemptions")
    assert preemptions["check"] == {simulated.core.scheduler.num_preemptions}
    assert simulated.core.scheduler.num_preemptions > 0
    assert simulated.executor.num_steps == len(steps["seconds"])
    assert found == pytest.approx(real, rel=0.10)
