"""The simulator, fitted to one run of the real engine, against another run of it.

Method: two engines take steps in turn, one with the requests that the simulator is fitted to, as
often as it takes, the other with those that it is checked against. So whatever else uses the
machine, and whatever becomes of its speed, both meet the same. Seconds are those of the processor
in an engine's own steps.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.simulate.replay import Replay
from octavo.bench.simulate.setup import simulated_engine
from octavo.bench.simulate.traces import TraceRequest
from octavo.bench.step_recorder import StepRecorder
from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.registry import Registry
from octavo.engine.builder import build_engine
from octavo.engine.core import EngineCore
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config

SHAPES = {"fit": Shape(64, 24, 16), "check": Shape(64, 32, 24)}


class Stopwatch:
    """Seconds of the processor in `with` blocks, as a clock."""

    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def __call__(self) -> float:
        running = 0.0 if self._since is None else time.process_time() - self._since
        return self._total + running

    def __enter__(self) -> None:
        self._since = time.process_time()

    def __exit__(self, *error: object) -> None:
        self._total, self._since = self(), None


class Run:
    """One engine that serves one kind of work."""

    def __init__(self, engine: EngineCore, shape: Shape) -> None:
        self.engine, self._shape = engine, shape
        self._watch = Stopwatch()
        self._next_handle = 0
        for _ in self.steps(Shape(4, 24, 4)):  # to warm up
            pass
        slots = engine.scheduler.limits.max_num_seqs
        self.recorder = StepRecorder(engine.executor, slots, self._watch)
        engine.executor = self.recorder

    def steps(self, shape: Shape | None = None) -> Iterator[None]:
        """Serve all requests once, a step at a time."""
        shape = shape or self._shape
        prompts = random_prompts(shape, self.engine.scheduler.limits.vocab_size, seed=1)
        for request in requests(prompts, shape.output_len, self._next_handle):
            self.engine.add(request)
        self._next_handle += shape.num_prompts
        while self.engine.has_work():
            with self._watch:
                self.engine.step()
            yield
        assert self.engine.reset_prefix_cache()


def in_turn(check: Run, fit: Run) -> None:
    """All steps of `check` once, and between them those of `fit`, again and again."""
    fitting = iter(())
    for _ in check.steps():
        if next(fitting, "ended") == "ended":
            fitting = fit.steps()
            next(fitting)
    for _ in fitting:
        pass


def measured(demo_model: str, tmp_path: Path) -> tuple[float, float]:
    """(seconds of the real engine, seconds of the simulated one), whose steps and preemptions are
    the same."""
    registry = Registry.discover()
    mapping: dict[str, Any] = {
        "model": {"source": demo_model, "max_model_len": 256},
        "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 128},
        "kv_cache": {"num_blocks": 96},
        "executor": {"device": "cpu", "num_threads": 1},
    }
    runs = {}
    for name, shape in SHAPES.items():
        resolved = resolve(load_config(mapping=mapping), registry)
        runs[name] = Run(build_engine(resolved, registry), shape)
    try:
        in_turn(runs["check"], runs["fit"])
        startup = runs["fit"].engine.report.as_dict()
        preemptions = runs["check"].engine.scheduler.num_preemptions
    finally:
        for each in runs.values():
            each.engine.close()
    file = tmp_path / "throughput.json"
    steps = runs["fit"].recorder.records()
    file.write_text(json.dumps({"steps": steps, "startup": startup}))
    mapping["executor"] |= {"kind": {"name": "simulated", "fitted": str(file)}}
    simulated = simulated_engine(load_config(mapping=mapping), registry)
    replay = Replay(simulated)
    shape = SHAPES["check"]
    replay.run(TraceRequest(0.0, shape.input_len, shape.output_len) for _ in range(64))
    seconds = runs["check"].recorder.records()["seconds"]
    real, found = sum(seconds), replay.collector.end
    print(f"real {real:.2f} s, simulated {found:.2f} s, {preemptions} preemptions")
    assert simulated.core.scheduler.num_preemptions == preemptions > 0
    assert simulated.executor.num_steps == len(seconds)
    return real, found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fitted_simulation_does_what_the_engine_does(demo_model: str, tmp_path: Path) -> None:
    """The time is within a tenth in one of five tries: a machine that others use, too, changes its
    speed by more than that from one step to the next."""
    tries = []
    for _ in range(5):
        real, found = measured(demo_model, tmp_path)
        tries.append(round(found / real, 2))
        if found == pytest.approx(real, rel=0.10):
            return
    pytest.fail(f"simulated over real seconds: {tries}")
