"""The simulator, fitted to one run of the real engine, against another run of it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

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


def run(engine: EngineCore, shape: Shape, first_handle: int) -> tuple[dict[str, Any], int]:
    """Steps of a run with their seconds, and how many preemptions it saw.

    Seconds of the processor, not of the clock: one thread computes, and others may use the machine.
    """
    prompts = random_prompts(shape, engine.scheduler.limits.vocab_size, seed=first_handle)
    before = engine.scheduler.num_preemptions
    recorder = StepRecorder(
        engine.executor, engine.scheduler.limits.max_num_seqs, time.process_time
    )
    engine.executor = recorder
    run_requests(engine, list(requests(prompts, shape.output_len, first_handle)))
    engine.executor = recorder.executor
    assert engine.reset_prefix_cache()
    return recorder.records(), engine.scheduler.num_preemptions - before


@pytest.mark.slow
def test_a_fitted_simulation_does_what_the_engine_does(demo_model: str, tmp_path: Path) -> None:
    registry = Registry.discover()
    mapping: dict[str, Any] = {
        "model": {"source": demo_model, "max_model_len": 256},
        "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 128},
        "kv_cache": {"num_blocks": 96},
        "executor": {"device": "cpu", "num_threads": 1},
    }
    engine = build_engine(resolve(load_config(mapping=mapping), registry), registry)
    try:
        run(engine, Shape(4, 24, 4), 10_000)  # to warm up
        measured = {
            name: run(engine, shape, 1000 * (i + 1))
            for i, (name, shape) in enumerate(SHAPES.items())
        }
        startup = engine.report.as_dict()
    finally:
        engine.close()
    file = tmp_path / "throughput.json"
    file.write_text(json.dumps({"steps": measured["fit"][0], "startup": startup}))
    mapping["executor"] |= {"kind": {"name": "simulated", "fitted": str(file)}}
    simulated = simulated_engine(load_config(mapping=mapping), registry)
    replay = Replay(simulated)
    shape = SHAPES["check"]
    replay.run(TraceRequest(0.0, shape.input_len, shape.output_len) for _ in range(64))
    steps, preemptions = measured["check"]
    real = sum(steps["seconds"])
    print(f"real {real:.2f} s, simulated {replay.collector.end:.2f} s, {preemptions} preemptions")
    assert preemptions > 0
    assert simulated.core.scheduler.num_preemptions == preemptions
    assert simulated.executor.num_steps == len(steps["seconds"])
    # How near the two times are is a benchmark (docs/benchmarks.md): two runs of one engine on a
    # busy machine differ more. Here only that the same seconds are meant.
    assert real / 3 < replay.collector.end < real * 3
