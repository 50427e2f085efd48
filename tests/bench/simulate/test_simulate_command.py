"""`octavo simulate` from the command line: table, JSON, page, and what it says of mistakes."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path
from xml.etree import ElementTree

import pytest

from octavo.bench import charts
from octavo.bench.arguments import slo
from octavo.bench.slo import Slo
from octavo.server.command_line.main import main


@pytest.fixture
def example(repository: Path) -> str:
    return str(repository / "docs" / "examples" / "simulate.yaml")


@pytest.fixture
def small(example: str, tmp_path: Path) -> str:
    """The example with a small pool: it preempts."""
    text = Path(example).read_text().replace("memory_utilization: 0.9", "num_blocks: 60")
    file = tmp_path / "small.yaml"
    file.write_text(text)
    return str(file)


def test_two_configurations_give_one_table(
    example: str, small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers, page = tmp_path / "out.json", tmp_path / "out.html"
    command = ["simulate", example, small, "--synthetic", "60", "--rate", "200", "--users", "3"]
    command += ["--input-len", "600", "--output-len", "40", "--slo", "ttft=500ms,itl=0.05"]
    assert main([*command, "--json", str(numbers), "--report", str(page)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "synthetic"
    assert out[1] == "goodput counts requests with ttft at most 0.5 s, itl at most 0.05 s"
    rows = {line[:30].strip(): line[30:].split() for line in out[2:]}
    assert rows[""] == ["simulate", "small"]
    assert rows["served"] == ["60", "60"]
    assert rows["KV cache blocks"] == ["7,065", "60"]
    assert int(rows["preemptions"][1]) > int(rows["preemptions"][0]) == 0
    whole = json.loads(numbers.read_text())
    assert [result["config"] for result in whole["results"]] == ["simulate", "small"]
    first = whole["results"][0]
    assert first["requests"]["served"] == 60
    assert first["goodput"]["slo"] == {"ttft": 0.5, "itl": 0.05}
    assert first["ttft_s"]["p50"] <= first["ttft_s"]["p99"] <= first["ttft_s"]["max"]
    assert first["fairness"]["num_users"] == 3
    assert first["engine"]["num_blocks"] == 7065
    series = first["series"]
    assert len({len(column) for column in series.values()}) == 1
    check_page(page.read_text(), len(whole["results"]))


def check_page(text: str, num_configs: int) -> None:
    for outside in ("http:", "https:", "src=", "href=", "@import", "url(", "<script"):
        assert outside not in text, f"the page needs {outside}"
    assert text.count("<svg") == 7
    for part in text.split("<svg")[1:]:
        drawing = ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        lines = drawing.findall("polyline")
        assert len(lines) == num_configs
        for line in lines:
            points = [pair.split(",") for pair in line.attrib["points"].split()]
            assert points
            assert all(0 <= float(x) <= charts.WIDTH for x, _ in points)
            assert all(0 <= float(y) <= charts.HEIGHT for _, y in points)
    assert "user-2" in text
    assert "7,065 KV blocks of 64 tokens" in text


def test_a_trace_with_overrides(
    example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t.jsonl"
    row = {"timestamp": 0, "input_length": 1000, "output_length": 9, "hash_ids": [1, 2]}
    long = {"timestamp": 9, "input_length": 200_000, "output_length": 9, "hash_ids": []}
    trace.write_text("".join(json.dumps(r) + "\n" for r in (row, row, long)))
    command = ["simulate", example, "--trace", str(trace), "--concurrency", "1"]
    assert main([*command, "--set", "kv_cache.block_size=16"]) == 0
    out = capsys.readouterr().out
    assert "simulate refused: 1 longer than max_model_len" in out
    rows = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
    assert rows["prefix cache hit rate"] == [f"{992 / 2000:.2%}"]
    assert main([*command, "--limit", "1", "--max-output", "2", "--speedup", "3"]) == 0
    assert "first 1 requests, outputs cut to 2 tokens, 1 at a time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trace", "nowhere.jsonl"], "cannot read the trace 'nowhere.jsonl'"),
        (["--synthetic", "5", "--json", "no/folder/x.json"], "its folder does not exist"),
        (["--synthetic", "5", "--set", "executor.kind=local"], "got 'local'"),
        (["--synthetic", "5", "--set", "scheduler.policy=fcsf"], "did you mean 'fcfs'"),
    ],
)
def test_mistakes(
    example: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", example, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_empty_trace(example: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert main(["simulate", example, "--trace", str(tmp_path / "empty.jsonl")]) == 2
    assert "contains no requests" in capsys.readouterr().err


def test_targets() -> None:
    assert slo("ttft=2,itl=50ms") == Slo(ttft=2.0, itl=0.05)
    assert slo("e2e=3s") == Slo(e2e=3.0)
    for wrong in ("ttft", "ttft=x", "tft=1", "ttft=-1", "ttft=1,ttft=2", ""):
        with pytest.raises(ArgumentTypeError, match="expected ttft=SECONDS"):
            slo(wrong)


def test_ticks_are_round_numbers() -> None:
    assert charts.ticks(0, 97) == [0, 20, 40, 60, 80]
    assert charts.ticks(0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert charts.log_ticks(3, 60) == [5, 10, 20, 50]
    assert [charts.number(v) for v in (0, 0.25, 950, 25_000, 3e6)] == [
        "0",
        "0.25",
        "950",
        "25k",
        "3M",
    ]
    assert "nothing to plot" in charts.chart([], x="x", y="y")
