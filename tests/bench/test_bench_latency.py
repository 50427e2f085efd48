"""`octavo bench latency` and `octavo bench startup`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.latency import measure
from octavo.bench.load.engine import EngineDriver
from octavo.bench.startup import StartError, start_once
from octavo.bench.workloads.calls import Call
from octavo.bench.workloads.spec import WorkloadSpec
from octavo.server.command_line.main import main
from octavo.testing.fake_engine import make_fake_engine


def test_a_driver_notes_when_tokens_come_on_the_engines_clock() -> None:
    engine = make_fake_engine()
    run = EngineDriver(engine).run(
        [Call(3, (1, 2)), Call(2, (3,)), Call(2, (4,), after=0), Call(5000, (1,))]
    )
    assert [a.num_output for a in run.answers[:3]] == [3, 2, 2]
    assert run.answers[2].sent >= run.answers[0].ended
    assert "max_model_len" in (run.answers[3].error or "")
    for answer in run.answers[:3]:
        assert answer.sent < answer.times[0] < answer.times[-1] == answer.ended
    assert run.seconds >= run.answers[2].ended
    assert 0 < run.kv_peak <= 1
    assert run.num_steps >= 5
    again = EngineDriver(engine).run([Call(1, (1, 2))])
    assert again.num_steps == 1
    engine.close()


def test_a_closed_loop_has_no_more_under_way() -> None:
    engine = make_fake_engine()
    run = EngineDriver(engine).run([Call(4, (i,)) for i in range(6)], max_concurrency=2)
    moments = sorted([(a.sent, 1) for a in run.answers] + [(a.ended, -1) for a in run.answers])
    under_way, most = 0, 0
    for _, change in moments:
        under_way += change
        most = max(most, under_way)
    assert most == 2
    engine.close()


def test_batches_are_measured() -> None:
    engine = make_fake_engine()
    spec = WorkloadSpec(num_requests=3, input_len=4, output_len=5)
    found = measure(engine, spec, engine.scheduler.limits.vocab_size, 1, 2)
    assert len(found["latencies"]) == 2
    assert found["ttft_s"]["mean"] < found["latency_s"]["mean"]
    with pytest.raises(RuntimeError, match="not valid"):
        measure(engine, WorkloadSpec(output_len=10_000), 10, 0, 1)
    engine.close()


def test_the_latency_command(instant_yaml: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "out.json"
    command = ["bench", "latency", "--config", str(instant_yaml), "--batch-size", "3"]
    command += ["--input-len", "5", "--output-len", "4", "--num-iters", "2"]
    assert main([*command, "--num-iters-warmup", "1", "--output-json", str(file)]) == 0
    assert "inter-token latency" in capsys.readouterr().out
    result = json.loads(file.read_text())
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 2)
    assert result["workload"]["num_requests"] == 3


@pytest.mark.slow
def test_the_startup_command(instant_yaml: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "out.json"
    command = ["bench", "startup", "--config", str(instant_yaml), "--num-iters-cold", "1"]
    command += ["--num-iters-warmup", "0", "--num-iters-warm", "1", "--json", str(file)]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "cold (1)" in captured.out
    assert "warm start 1:" in captured.err
    result = json.loads(file.read_text())
    for kind in ("cold", "warm"):
        figures = result[kind]
        parts = ("configuration_s", "engine_s", "first_token_s")
        assert figures["total_s"]["p50"] == pytest.approx(
            sum(figures[name]["p50"] for name in parts)
        )


def test_a_start_that_fails_says_why(instant_config: dict[str, Any], tmp_path: Path) -> None:
    broken = instant_config | {"model": {"source": str(tmp_path / "nowhere")}}
    with pytest.raises(StartError, match="nowhere"):
        start_once(broken, tmp_path)
