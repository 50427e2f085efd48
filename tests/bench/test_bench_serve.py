"""`octavo bench serve` against a real server without a model, and its arithmetic."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.load.answers import Answer, distribution, samples, totals
from octavo.bench.serve import add_arguments, goodput, make_calls
from octavo.bench.server_process import ServerError, ServerProcess
from octavo.bench.slo import Slo
from octavo.core.errors import ConfigError
from octavo.server.command_line.main import main


def parsed(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(given)


def test_times_follow_from_the_arrivals_of_tokens() -> None:
    answers = [
        Answer(1.0, 10, 3, times=[2.0, 2.5, 4.0], counts=[1, 1, 1], ended=4.0),
        Answer(1.0, 5, 1, times=[3.0], counts=[1], ended=3.0),
        Answer(1.0, error="refused"),
    ]
    found = samples(answers)
    assert found["ttft"] == [1.0, 2.0]
    assert found["itl"] == [0.5, 1.5]
    assert found["tpot"] == [1.0]
    assert found["e2e"] == [3.0, 2.0]
    result = totals(answers, 4.0, Slo(ttft=1.5))
    assert (result["completed"], result["failed"]) == (2, 1)
    assert result["output_tokens_per_s"] == 1.0
    assert result["total_tokens_per_s"] == 19 / 4
    assert result["goodput"] == 0.25
    assert distribution([])["p99"] == 0.0


def test_against_a_server(instant_server: ServerProcess, tmp_path: Path, capsys) -> None:
    command = ["bench", "serve", "--base-url", instant_server.url, "--num-prompts", "10"]
    command += ["--random-input-len", "24", "--random-output-len", "6", "--max-concurrency", "4"]
    command += ["--num-warmups", "1", "--percentile-metrics", "ttft,tpot,itl,e2el"]
    command += ["--metric-percentiles", "50,99", "--goodput", "e2el:60000", "--save-detailed"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--label", "x"]
    assert main([*command, "--metadata", "machine=this"]) == 0
    out = capsys.readouterr().out
    assert "Successful requests:" in out
    assert "P99 TTFT (ms):" in out
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 10
    assert result["model_id"] == "instant"
    assert result["total_input_tokens"] == 240
    assert result["total_output_tokens"] == 60
    assert result["input_lens"] == [24] * 10
    assert result["output_lens"] == [6] * 10
    assert all(len(gaps) == 5 for gaps in result["itls"])
    assert result["max_concurrent_requests"] <= 4
    assert result["machine"] == "this"
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["median_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["mean_e2el_ms"] >= 6 * 2.0  # a step sleeps for 2 ms


def test_chat_text_and_rates(instant_server: ServerProcess, capsys) -> None:
    command = ["bench", "serve", "--url", instant_server.url, "--num-prompts", "4"]
    command += ["--backend", "openai-chat", "--input-len", "8", "--output-len", "3"]
    assert main([*command, "--request-rate", "100", "--burstiness", "0.5"]) == 0
    out = capsys.readouterr().out
    assert "Failed requests:                                       0" in out


def test_prompts_of_a_file(instant_server: ServerProcess, tmp_path: Path, capsys) -> None:
    file = tmp_path / "p.jsonl"
    rows = [{"prompt": "the quick", "output_tokens": 2}]
    rows += [{"messages": [{"role": "user", "content": "fox"}], "output_tokens": 4}]
    file.write_text("\n".join(map(json.dumps, rows)))
    command = ["bench", "serve", "--url", instant_server.url, "--dataset-name", "custom"]
    command += ["--dataset-path", str(file), "--num-prompts", "4", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--ignore-eos"]
    assert main(command) == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["total_output_tokens"] == 2 * (2 + 4)


def test_failed_requests_are_counted_and_named(instant_server: ServerProcess, capsys) -> None:
    command = ["bench", "serve", "--url", instant_server.url, "--num-prompts", "2"]
    assert main([*command, "--random-input-len", "9000", "--random-output-len", "4"]) == 1
    captured = capsys.readouterr()
    assert "2 requests failed: /v1/completions: 400:" in captured.err
    assert "max_model_len" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--base-url", "http://127.0.0.1:9"], "cannot connect to http://127.0.0.1:9"),
        (["--base-url", "ftp://x"], "expected a URL"),
        (["--percentile-metrics", "speed"], "got speed"),
        (["--metric-percentiles", "101"], "from 0 to 100"),
        (["--goodput", "itl:3"], "expected ttft:MS"),
        (["--dataset-name", "custom"], "needs --dataset-path"),
        (["--ramp-up-strategy", "linear"], "a ramp needs"),
        (["--save-result", "--result-dir", "/nowhere"], "is not a directory"),
        (["--header", "x"], "expected KEY=VALUE"),
    ],
)
def test_mistakes_of_bench_serve(arguments: list[str], message: str, capsys) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_goodput_is_in_milliseconds() -> None:
    assert goodput(["ttft:200", "tpot:50", "e2el:3000"]) == Slo(ttft=0.2, itl=0.05, e2e=3.0)
    assert not goodput(None)
    with pytest.raises(ConfigError):
        goodput(["ttft:x"])


def test_a_prefix_is_shared_and_lengths_are_fixed() -> None:
    calls = make_calls(parsed("--num-prompts", "5", "--random-prefix-len", "7"), 100)
    assert {len(c.token_ids or ()) for c in calls} == {1024 + 7}
    assert len({(c.token_ids or ())[:7] for c in calls}) == 1


def test_a_ramp_of_requests() -> None:
    ramp = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"]
    calls = make_calls(parsed("--num-prompts", "400", *ramp), 100)
    first, last = calls[200].arrival - calls[0].arrival, calls[399].arrival - calls[200].arrival
    assert first > 1.8 * last


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerError, match="nowhere"):
        ServerProcess({"model": {"source": "/nowhere"}})


@pytest.mark.slow
def test_waiting_for_a_server_that_loads(instant_config: dict[str, Any], capsys) -> None:
    slow = dict(instant_config["executor"]["kind"], load_s=1.5)
    config = instant_config | {"executor": {"kind": slow, "device": "cpu"}}
    server = ServerProcess(config, wait=False)
    try:
        command = ["bench", "serve", "--url", server.url, "--num-prompts", "2"]
        command += ["--input-len", "8", "--output-len", "3"]
        assert main(command) == 2  # it listens not yet, or answers 503
        assert capsys.readouterr().err.startswith("octavo: ")
        assert main([*command, "--ready-check-timeout-sec", "60"]) == 0
    finally:
        server.stop()
