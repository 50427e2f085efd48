"""`octavo sweep` and `octavo tune` on the simulator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from octavo.bench.slo import Slo
from octavo.bench.sweep.points import Point, best, grid, mark_front, variations
from octavo.bench.sweep.tune import proposal, search
from octavo.bench.workloads.spec import WorkloadSpec
from octavo.core.errors import ConfigError
from octavo.frontend.config import load_config
from octavo.server.command_line.main import main


def point(speed: float, ttft: float, itl: float, **more: float) -> Point:
    metrics = {"output_tokens_per_s": speed, "ttft_p99": ttft, "itl_p99": itl, **more}
    return Point({"a": f"{speed}"}, metrics)


def test_the_front_holds_what_nothing_beats() -> None:
    points = [point(10, 1, 1), point(20, 2, 2), point(15, 2, 2), point(5, 0.5, 3)]
    points.append(Point({}, error="broken"))
    mark_front(points)
    assert [p.front for p in points] == [True, True, False, True, False]


def test_the_best_keeps_the_targets() -> None:
    points = [point(10, 1, 1, goodput=3), point(20, 2, 2, goodput=5), Point({}, error="x")]
    assert best(points, Slo())[0] is points[1]
    assert best(points, Slo(ttft=1.5))[0] is points[0]
    found, why = best(points, Slo(itl=0.1))
    assert found is points[1]
    assert "none keeps" in why
    assert best(points[2:], Slo()) == (None, "nothing could run")


def test_variations() -> None:
    found = variations(["a.b=1,2", "c=[x, y],z", "d={name: n, k: 1}"])
    assert found == {"a.b": ["1", "2"], "c": ["[x, y]", "z"], "d": ["{name: n, k: 1}"]}
    assert len(grid(found)) == 4
    assert grid({"a": ["1", "2"], "b": ["3", "4"]})[1] == {"a": "1", "b": "4"}
    for wrong in (["a"], ["a="], ["a=1,"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--vary"):
            variations(wrong)


def test_a_sweep_on_the_simulator(sim_yaml: str, tmp_path: Path, capsys) -> None:
    numbers, page = tmp_path / "out.json", tmp_path / "out.html"
    command = ["sweep", sim_yaml, "--vary", "scheduler.max_num_seqs=1,16,0", "--rounds", "1"]
    command += ["--num-requests", "24", "--input-len", "400", "--slo", "ttft=500ms,itl=50ms"]
    assert main([*command, "--json", str(numbers), "--report", str(page)]) == 0
    out = capsys.readouterr().out
    assert "best: max_num_seqs=16" in out
    (broken,) = (line for line in out.splitlines() if "max_num_seqs=0" in line)
    assert "cannot run: " in broken
    assert "scheduler.max_num_seqs" in broken
    result = json.loads(numbers.read_text())
    first, second, third = result["points"]
    assert second["metrics"]["output_tokens_per_s"] > 2 * first["metrics"]["output_tokens_per_s"]
    assert second["front"]
    assert third["error"]
    assert result["best"] == {"scheduler.max_num_seqs": "16"}
    text = page.read_text()
    for part in text.split("<svg")[1:]:
        drawing = ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
        assert len(drawing.findall("circle")) == 2
    assert "http" not in text


@pytest.mark.slow
def test_any_configuration_on_a_simulated_device(repository: Path, tmp_path: Path) -> None:
    """The facts of a model come from its own folder; only the executor is replaced."""
    from octavo.testing.model_folder import write_model_folder

    folder = write_model_folder(tmp_path / "model")
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"model": {"source": str(folder), "weight_source": "dummy"}}))
    numbers = tmp_path / "out.json"
    command = ["sweep", str(file), "--simulate", "l4", "--vary", "kv_cache.block_size=16,32"]
    command += ["--rounds", "1", "--num-requests", "4", "--input-len", "20"]
    assert main([*command, "--json", str(numbers)]) == 0
    result = json.loads(numbers.read_text())
    assert [p["error"] for p in result["points"]] == [None, None]


def test_mistakes_of_sweep(sim_yaml: str, capsys) -> None:
    assert main(["sweep", sim_yaml, "--vary", "scheduler.max_num_seqs=1,2", "--max-points", "1"])
    assert "2 combinations" in capsys.readouterr().err
    assert main(["sweep", sim_yaml, "--simulate", "h100", "--vary", "a.b=1"]) == 2
    assert "names a simulated executor already" in capsys.readouterr().err


@pytest.mark.slow
def test_tuning_finds_more_seats(sim_yaml: str, tmp_path: Path, capsys) -> None:
    tuned, numbers = tmp_path / "tuned.yaml", tmp_path / "out.json"
    command = ["tune", sim_yaml, "--num-requests", "24", "--input-len", "100", "--rounds", "1"]
    command += ["--keys", "scheduler.max_num_seqs", "--confirm-rounds", "6"]
    assert main([*command, "--output", str(tuned), "--json", str(numbers)]) == 0
    out = capsys.readouterr().out
    assert "scheduler.max_num_seqs: 4 -> 16" in out
    assert "confirmed in 6 paired rounds" in out
    config = load_config(str(tuned))
    assert config.scheduler.max_num_seqs == 16
    assert config.scheduler.max_num_batched_tokens == 2048
    text = tuned.read_text()
    assert "# scheduler.max_num_seqs: 16, was 4 (+" in text
    result = json.loads(numbers.read_text())
    assert result["confirmed"]
    assert result["comparison"]["low"] > 1


def test_a_gain_within_the_noise_is_not_taken() -> None:
    facts: dict[str, Any] = {
        "report": {"max_num_seqs": 4, "max_num_batched_tokens": 64},
        "config": {},
    }
    base = Point({}, {"output_tokens_per_s": 100.0}, spread=0.05, facts=facts)

    def run(keys: dict[str, str]) -> Point:
        fast = 108.0 if keys.get("scheduler.max_num_seqs") == "8" else 90.0
        return Point(keys, {"output_tokens_per_s": fast}, spread=0.01, facts=facts)

    keys = ["scheduler.max_num_seqs"]
    found, steps = search(base, keys, WorkloadSpec(), Slo(), run)
    assert found is base
    assert steps[0].chosen is None
    base.spread = 0.01
    found, steps = search(base, keys, WorkloadSpec(), Slo(), run)
    assert found.keys == {"scheduler.max_num_seqs": "8"}
    assert steps[0].gain == pytest.approx(0.08)


def test_a_proposal_keeps_the_rest_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model: {source: x}\nserver: {api_keys: {me: secret}}\n")
    found = yaml.safe_load(
        proposal(file, ["model.seed=3"], Point({"scheduler.policy": "[priority, fair]"}), [])
    )
    assert found["server"]["api_keys"] == {"me": "secret"}
    assert found["scheduler"]["policy"] == ["priority", "fair"]
    assert found["model"] == {"source": "x", "seed": 3}
