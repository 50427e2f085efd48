"""The throughput benchmark's arithmetic, on an engine without a model."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import numpy as np
import pytest

from octavo.bench.throughput import add_arguments, lines, main, measure, run_requests
from octavo.bench.token_times import TokenTimes, summarize
from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.errors import ConfigError
from octavo.core.messages import EngineOutputs, Finish
from octavo.testing.fake_engine import make_fake_engine


def outputs(handles: list[int], finished: list[Finish] | None = None) -> EngineOutputs:
    return EngineOutputs(
        step=0,
        handles=np.asarray(handles, np.int64),
        token_ids=np.zeros((len(handles), 1), np.int32),
        finished=finished or [],
    )


def test_latencies_are_those_of_the_steps() -> None:
    times = TokenTimes(2, first_handle=10, start=100.0)
    assert times.record(outputs([10]), 101.0) == 1
    assert times.record(outputs([10, 11]), 103.0) == 2
    ends = [Finish(handle=10, reason="length"), Finish(handle=11, reason="length")]
    times.record(outputs([11, 10], ends), 104.5)
    result = times.result()
    assert result["ttft_s"]["mean"] == pytest.approx((1.0 + 3.0) / 2)
    assert result["itl_s"]["mean"] == pytest.approx((2.0 + 1.5 + 1.5) / 3)
    assert result["itl_s"]["p50"] == pytest.approx(1.5)
    assert times.num_tokens.tolist() == [3, 2]
    assert times.check(3) == "request 1 ended with 'length' after 2 of 3 tokens"


def test_rows_with_several_or_no_tokens_count_as_they_are() -> None:
    times = TokenTimes(2, first_handle=0, start=0.0)
    step = EngineOutputs(
        step=0,
        handles=np.asarray([0, 1], np.int64),
        token_ids=np.zeros((2, 3), np.int32),
        counts=np.asarray([3, 0], np.int32),
    )
    assert times.record(step, 1.0) == 3
    assert times.num_tokens.tolist() == [3, 0]
    assert times.check(3) == "request 0 ended with 'no end' after 3 of 3 tokens"


def test_percentiles() -> None:
    found = summarize(np.arange(101, dtype=np.float64))
    assert found == {"mean": 50.0, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert summarize(np.empty(0)) == {"mean": 0.0, "p50": 0.0, "p95": 0.0, "p99": 0.0}


PROMPTS_OF_SEED_7 = [[10742, 38467, 919, 13927], [34140, 2583, 28232, 27354]]


def test_equal_seeds_give_everybody_equal_prompts() -> None:
    shape = Shape(num_prompts=2, input_len=4, output_len=1)
    prompts = random_prompts(shape, 49152, seed=7)
    assert prompts.dtype == np.int32
    assert prompts.tolist() == PROMPTS_OF_SEED_7
    assert random_prompts(shape, 49152, seed=8).tolist() != PROMPTS_OF_SEED_7


def test_requests_generate_exactly_what_is_asked() -> None:
    prompts = random_prompts(Shape(3, 5, 6), 97, seed=0)
    first, *others = requests(prompts, 6, first_handle=40)
    assert [r.handle for r in others] == [41, 42]
    assert first.max_tokens == 6
    assert first.sampling.ignore_eos
    assert first.sampling.greedy


def test_figures_of_a_run_fit_together() -> None:
    ticks = itertools.count()
    shape = Shape(num_prompts=20, input_len=10, output_len=6)
    result = measure(make_fake_engine(), shape, 97, seed=0, clock=lambda: float(next(ticks)))
    # the clock ticks once at the start, once a step with outputs, and once at the end
    assert result["elapsed_s"] == next(ticks) - 1
    assert result["output_tokens_per_s"] == pytest.approx(120 / result["elapsed_s"])
    assert result["total_tokens_per_s"] == pytest.approx(320 / result["elapsed_s"])
    assert result["itl_s"]["p50"] == 1.0
    assert result["ttft_s"]["p99"] > result["ttft_s"]["p50"] >= 1.0  # 20 requests, 8 seats
    assert list(result["step_phases"]) == ["schedule", "prepare", "forward", "sample", "commit"]
    assert sum(p["share"] for p in result["step_phases"].values()) == pytest.approx(1.0)
    assert result["num_steps"] == result["elapsed_s"] - 1  # without the warm-up's steps


def test_a_run_that_did_less_work_is_no_result() -> None:
    shape = Shape(num_prompts=3, input_len=10, output_len=20)
    with pytest.raises(RuntimeError, match=r"after 14 of 20 tokens"):
        measure(make_fake_engine(max_model_len=24), shape, 97, seed=0)


def test_every_token_is_reported_to_the_progress_bar() -> None:
    batch = list(requests(random_prompts(Shape(5, 4, 3), 97, seed=1), 3))
    seen: list[int] = []
    run_requests(make_fake_engine(), batch, on_tokens=seen.append)
    assert sum(seen) == 15


def test_lines_for_people_name_every_figure() -> None:
    shape = Shape(num_prompts=4, input_len=6, output_len=3)
    result = measure(make_fake_engine(), shape, 97, seed=0)
    result |= {"model": "tiny", "workload": {**vars(shape), "seed": 0}, "startup_s": 1.5}
    result |= {"peak_rss_bytes": 3 << 20, "peak_device_bytes": 5 << 20}
    text = "\n".join(lines(result))
    for part in ("tiny: 4 requests, 6 tokens in, 3 out, seed 0", "time to first token", "1.50 s"):
        assert part in text
    for part in ("inter-token latency", "3 MiB", "5 MiB", "schedule", "commit"):
        assert part in text


def command_line(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_a_result_that_cannot_be_written_is_told_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line("--json", str(tmp_path / "none" / "x.json"))
    assert "cannot write" in capsys.readouterr().err
    assert command_line("--json", str(tmp_path / "x.json")).json == tmp_path / "x.json"


@pytest.mark.parametrize("seed", ["-1", str(2**32)])
def test_a_seed_that_makes_no_prompts_is_refused_before_the_start(seed: str) -> None:
    with pytest.raises(ConfigError, match=f"--seed: expected 0 to 4294967295.* got {seed}"):
        main(command_line("--model", "nowhere", "--seed", seed))
