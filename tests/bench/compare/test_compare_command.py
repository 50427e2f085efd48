"""`octavo compare` as a user runs it: engines in processes, servers, known differences, reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from octavo.bench.server_process import ServerProcess
from octavo.server.command_line.main import main

FAST = ["--rounds", "6", "--noise-rounds", "1", "--check-prompts", "0"]


def compare(tmp_path: Path, *arguments: str, status: int = 0) -> dict[str, Any]:
    """Run the command; its JSON."""
    file = tmp_path / "out.json"
    assert main(["compare", *arguments, "--json", str(file)]) == status
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {row["metric"]: row["verdict"] for row in result["metrics"]}


@pytest.fixture(scope="module")
def chunks(simulated_yaml: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of step budgets on the virtual clock: its folder, with JSON and page."""
    folder = tmp_path_factory.mktemp("chunks")
    arguments = ["--input-len", "2000", "--range-ratio", "0.5", "--rate", "120"]
    arguments += ["--num-requests", "24", "--slo", "ttft=50ms,itl=5ms", *FAST]
    arguments += ["--report", str(folder / "out.html")]
    other = f"{simulated_yaml}+scheduler.max_num_batched_tokens=128"
    compare(folder, simulated_yaml, other, *arguments)
    return folder


@pytest.mark.slow
def test_the_chunk_size_shows_with_the_right_sign(chunks: Path) -> None:
    """Small chunks: less time between tokens at the tail, more until the first one."""
    result = json.loads((chunks / "out.json").read_text())
    found = verdicts(result)
    assert found["itl_p99"] == "better"
    assert found["ttft_mean"] == "worse"
    rows = {row["metric"]: row for row in result["metrics"]}
    assert rows["itl_p99"]["high"] < 1 < rows["ttft_mean"]["low"]
    keys = [key for key, _ in result["differences"]]
    assert keys == ["scheduler.max_num_batched_tokens", "at start: max_num_batched_tokens"]
    assert result["differences"][0][1] == [4096, 128]
    assert [side["name"] for side in result["sides"]] == ["sim", "sim+max_num_batched_tokens=128"]
    assert rows["ttft_mean"]["noise"] < 0.01  # a virtual clock has none but the lengths of steps
    # Both sides had the same requests.
    first, other = (rounds[0] for rounds in result["data"])
    assert first["prompt_tokens"] == other["prompt_tokens"]


def test_the_page_stands_alone(chunks: Path) -> None:
    text = (chunks / "out.html").read_text()
    for outside in ("http:", "https:", "src=", "href=", "@import", "url(", "<script"):
        assert outside not in text, f"the page needs {outside}"
    assert text.count("<svg") >= 8
    for part in text.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + part.split("</svg>")[0] + "</svg>")
    for words in ("What differs", "max_num_batched_tokens", "A/A noise", "Phases of a step"):
        assert words in text


def test_the_page_opens_in_a_browser(chunks: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = Path("/usr/bin/chromium")
    if not chromium.exists():
        pytest.skip("no Chromium")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    with playwright.sync_playwright() as tools:
        browser = tools.chromium.launch(
            executable_path=str(chromium), args=flags.split(), timeout=120_000
        )
        page = browser.new_page()
        page.set_default_timeout(60_000)
        trouble: list[str] = []
        page.on("console", lambda message: trouble.append(message.text))
        page.on("pageerror", lambda error: trouble.append(str(error)))
        page.on("request", lambda r: trouble.append(r.url) if r.url[:5] != "file:" else None)
        page.goto(f"file://{chunks / 'out.html'}")
        assert page.title() == "Octavo comparison"
        boxes = [box for svg in page.query_selector_all("svg") if (box := svg.bounding_box())]
        width = page.evaluate("document.documentElement.scrollWidth")
        browser.close()
    assert trouble == []
    assert len(boxes) >= 8
    assert all(box["width"] > 200 and box["height"] > 50 for box in boxes)
    assert width <= 1280


@pytest.mark.slow
def test_equal_simulations_do_not_differ(simulated_yaml: str, tmp_path: Path, capsys) -> None:
    """A/A on the virtual clock, conversations in a closed loop."""
    arguments = ["--workload", "multi-turn", "--concurrency", "2", "--num-requests", "8"]
    arguments += ["--rounds", "6", "--fail-if", "ttft_p99>1.001", "--check-prompts", "0"]
    result = compare(tmp_path, simulated_yaml, simulated_yaml, *arguments)
    modelled = [r for r in result["metrics"] if not r["metric"].startswith(("step_", "peak_"))]
    assert {row["verdict"] for row in modelled} == {"same"}
    assert result["data"][0][0]["prefix_hit_rate"] > 0.3
    assert "the sides do not differ: sim (1), sim (2)" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sleep_in_a_policy_is_found(
    quick_yaml: str, slow_policy: str, tmp_path: Path, capsys
) -> None:
    """Each step of 2 ms takes 12 ms more."""
    load = f"plugins.load=[octavo.testing.instant_executor, {slow_policy}]"
    other = f"{quick_yaml}+{load}+scheduler.policy=slow"
    arguments = ["--num-requests", "8", "--input-len", "20", "--output-len", "12", *FAST]
    arguments += ["--fail-if", "itl_mean>1.2"]
    result = compare(tmp_path, quick_yaml, other, *arguments, status=1)
    found = verdicts(result)
    assert found["output_tokens_per_s"] == found["itl_mean"] == found["e2e_mean"] == "worse"
    rows = {row["metric"]: row for row in result["metrics"]}
    assert rows["itl_mean"]["low"] > 1.2
    assert rows["output_tokens_per_s"]["high"] < 1
    assert [side["kind"] for side in result["sides"]] == ["engine", "engine"]
    differing = dict(result["differences"])
    assert differing["scheduler.policy"] == ["fcfs", "slow"]
    assert "slow" in differing["plugin: scheduler_policy"][1]
    assert "itl_mean>1.2, it is" in capsys.readouterr().out


@pytest.mark.slow
def test_outputs_are_checked(tiny_yaml: str, tmp_path: Path, capsys) -> None:
    """Three sides: the first two alike, the last with other weights."""
    arguments = ["--rounds", "1", "--num-requests", "2", "--output-len", "4", "--input-len", "8"]
    arguments += ["--check-prompts", "3", "--check-tokens", "6", "--noise-rounds", "0"]
    other = f"{tiny_yaml}+model.weight_source={{name: dummy, seed: 1}}"
    result = compare(
        tmp_path, tiny_yaml, tiny_yaml, other, *arguments, "--fail-if", "output_errors>0", status=1
    )
    assert "tiny (2) against tiny (1)" in capsys.readouterr().out
    assert {row["side"] for row in result["metrics"]} == {1, 2}
    same, different = result["checks"]
    assert same["greedy"]["verdict"] == "identical"
    assert same["greedy"]["num_identical"] == 3
    assert same["greedy"]["noise"] == 0
    assert same["sampled"]["verdict"] == "too few"  # nearly every draw is another token
    assert same["sampled"]["draws"] == 128
    assert different["greedy"]["verdict"] == "error"
    assert different["greedy"]["prompts"][0]["first_margin"] is not None
    assert len(result["failures"]) == 1
    assert any("under 6 rounds" in note for note in result["notes"])


@pytest.mark.slow
def test_servers_are_sides_too(tiny_yaml: str, tmp_path: Path) -> None:
    """One that runs, and one that is started from the file."""
    server = ServerProcess(file=tiny_yaml)
    try:
        arguments = [tiny_yaml, "--serve", "--url", server.url, "--rounds", "1"]
        arguments += ["--num-requests", "3", "--input-len", "10", "--output-len", "5"]
        arguments += ["--check-prompts", "2", "--check-tokens", "4", "--check-samples", "16"]
        result = compare(tmp_path, *arguments)
    finally:
        server.stop()
    assert [side["kind"] for side in result["sides"]] == ["server", "server"]
    (check,) = result["checks"]
    assert check["greedy"]["verdict"] == "identical"
    assert len(check["greedy"]["prompts"][0]) >= 2
    assert check["sampled"]["verdict"] == "too few"
    started, running = (rounds[0] for rounds in result["data"])
    assert started["output_tokens"] == running["output_tokens"] == 15
    assert started["prompt_tokens"] == running["prompt_tokens"] == 30
    assert started["peak_memory"] > 2**24


@pytest.mark.slow
def test_prompts_and_traces(tiny_yaml: str, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "the quick fox", "output_tokens": 3}]
    rows += [{"messages": [{"role": "user", "content": "over"}], "output_tokens": 4}]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--rounds", "1", "--num-requests", "2", "--check-prompts", "0"]
    result = compare(tmp_path, tiny_yaml, tiny_yaml, "--workload", str(prompts), *arguments)
    assert result["workload"]["kind"] == "prompts"
    assert result["data"][0][0]["output_tokens"] == 7
    trace = tmp_path / "t.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,20,4\n2023-11-16 18:15:46.7805900,30,5\n"
    )
    result = compare(tmp_path, tiny_yaml, tiny_yaml, "--workload", str(trace), *arguments)
    assert result["workload"]["format"] == "azure"
    assert result["data"][1][0]["prompt_tokens"] == 50


@pytest.mark.slow
def test_a_side_that_breaks_is_named(quick_yaml: str, tmp_path: Path, capsys) -> None:
    broken = f"{quick_yaml}+executor.kind={{name: instant, load_exit: true}}"
    assert main(["compare", broken, quick_yaml]) == 2
    assert "the engine's process ended with status 3" in capsys.readouterr().err
    assert main(["compare", f"{quick_yaml}+scheduler.policy=fcsf", quick_yaml]) == 2
    assert "did you mean 'fcfs'" in capsys.readouterr().err
    long = ["--input-len", "9000", "--rounds", "1"]
    assert main(["compare", quick_yaml, quick_yaml, *long]) == 2
    assert "no request of a round was answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.yaml"], "expected at least two sides"),
        (["a.yaml", "b.yaml+x"], "expected FILE+key=value"),
        (["a.yaml", "b.yaml", "--workload", "nowhere"], "or a file, got 'nowhere'"),
        (["a.yaml", "b.yaml", "--ramp-to", "3"], "--ramp-to needs --rate"),
        (["nowhere.yaml", "b.yaml"], "nowhere.yaml"),
        (["--url", "http://127.0.0.1:9", "--url", "ftp://x"], "does not answer"),
    ],
)
def test_mistakes_of_compare(
    arguments: list[str], message: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.compare.sides.PATIENCE_S", 0.1)
    assert main(["compare", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_time_limits_cut_rounds_and_requests(quick_yaml: str, tmp_path: Path) -> None:
    arguments = ["--num-requests", "64", "--output-len", "64", "--input-len", "8"]
    arguments += ["--time-limit", "3", "--check-prompts", "0", "--rounds", "40"]
    arguments += ["--restart-every", "4"]
    result = compare(tmp_path, quick_yaml, quick_yaml, *arguments)
    assert 6 <= result["rounds"] < 40
    assert any("--time-limit" in note for note in result["notes"])


@pytest.mark.slow
def test_real_engines_that_do_not_differ(quick_yaml: str, tmp_path: Path) -> None:
    """A/A over 20 seeds in real time: at 5% each, more than 4 alarms have a chance of 0.3%."""
    from octavo.bench.compare.session import Plan, Session
    from octavo.bench.compare.sides import EngineSide
    from octavo.bench.workloads.spec import WorkloadSpec

    sides = [EngineSide(name, quick_yaml) for name in ("a", "b")]
    plan = Plan(rounds=6, noise_rounds=0, check_prompts=0)
    alarms = []
    try:
        for side in sides:
            side.start()
        for seed in range(20):
            spec = WorkloadSpec(num_requests=8, input_len=16, output_len=16, seed=seed)
            session = Session(sides, spec, plan)
            session._vocab_size = 285
            found = verdicts(session.run())
            alarms.append(sorted(n for n, v in found.items() if v in ("better", "worse")))
    finally:
        for side in sides:
            side.close()
    assert sum(map(bool, alarms)) <= 4, alarms
