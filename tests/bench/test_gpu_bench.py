"""`octavo bench gpu`: its arithmetic, its time limit, its table, and a run on a CPU."""

from __future__ import annotations

import argparse
import inspect
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.gpu import command, parts, table
from octavo.bench.gpu.budget import RESERVE_S, Outcome, PartError, Schedule
from octavo.bench.gpu.child import DeviceChild
from octavo.bench.gpu.clocks import CudaClock, HostClock, covered
from octavo.bench.gpu.engines import ROOM, Watch, start_facts
from octavo.bench.gpu.figures import derive, told
from octavo.bench.gpu.floor import decode_floor, hidden_share, prompt_flops, step_bytes
from octavo.bench.gpu.models import CONFIGS
from octavo.bench.gpu.parts import Part
from octavo.core.errors import ConfigError

COMMAND = [sys.executable, "-m", "octavo", "bench", "gpu"]

# ---- arithmetic ----------------------------------------------------------------------------------

REPORT = {
    "phases": {"load weights": 1.5},
    "weight_bytes": 2000,
    "num_parameters": 1000,
    "activation_bytes": 10,
    "kv_bytes": 6400,
    "num_blocks": 10,
    "block_size": 16,
    "num_graphs": 35,
    "graph_bytes": 77 * 2**20,
    "graph_bytes_estimated": 80 * 2**20,
    "memory": None,
    "plugins": [{"kind": "graph_runner", "name": "eager"}],
    "notes": (),
}
MODEL = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}


def test_what_a_step_must_read() -> None:
    start = start_facts(REPORT, MODEL)
    assert start["kv_token_bytes"] == 40
    # 2 bytes a weight; the embedding of 10 x 8 is not the head, so a step reads rows of it only
    assert step_bytes(start, 100) == 2000 - 160 + 40 * 100
    tied = start_facts(REPORT, {**MODEL, "tie_word_embeddings": True})
    assert step_bytes(tied, 0.5) == 2000 + 20
    assert decode_floor(5840, 2e6) == pytest.approx(0.00292)
    assert start["graphs"] == {
        "number": 35,
        "bytes": 77 * 2**20,
        "estimated_bytes": 80 * 2**20,
    }
    assert start["chosen"] == {"graph_runner": "eager"}


def test_operations_of_a_prompt() -> None:
    untied, tied = start_facts(REPORT, MODEL), start_facts(REPORT, {**MODEL, "head_dim": 16})
    tied["tied"] = True
    # layers: 1000 - 2 x 80; two heads of 4; three layers
    assert prompt_flops(untied, 5) == 2 * 840 * 5 + 2 * 80 + 2 * 25 * 8 * 3
    assert prompt_flops(tied, 5) == 2 * 920 * 5 + 2 * 80 + 2 * 25 * 32 * 3


def test_the_models_have_the_sizes_of_their_names() -> None:
    def size(name: str) -> float:
        config = CONFIGS[name]
        hidden, head = config["hidden_size"], config["head_dim"]
        heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
        layer = hidden * head * heads + 3 * hidden * config["intermediate_size"] + 2 * hidden
        embedding = config["vocab_size"] * hidden
        return float(layer * config["num_hidden_layers"] + embedding + hidden)

    assert size("llama-1b") == 1_235_814_400
    assert size("demo") == 134_515_008


@pytest.mark.parametrize(
    ("wall_1", "wall_2", "device", "expected"),
    [(3.0, 2.0, 2.0, 1.0), (3.0, 3.0, 2.0, 0.0), (3.0, 2.25, 2.0, 0.75), (2.0, 2.0, 2.0, None)],
)
def test_how_much_of_the_host_is_hidden(
    wall_1: float, wall_2: float, device: float, expected: float | None
) -> None:
    assert hidden_share(wall_1, wall_2, device) == expected


def test_busy_times_do_not_count_twice() -> None:
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2), (8, 8)]) == 4
    assert covered([]) == 0


def test_a_clock_measures_the_median() -> None:
    clock = HostClock()
    assert clock.between([1.0, 1.5, 4.0]) == [0.5, 2.5]
    calls: list[int] = []
    assert clock.measure(lambda: calls.append(1), warm=2, count=3) >= 0
    assert len(calls) == 5


class FakeEvent:
    """A CUDA event on a device whose clock is the number of events so far, squared, in ms."""

    count = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Any = None) -> None:
        type(self).count += 1
        self.at = self.count**2

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: FakeEvent) -> float:
        return float(end_event.at - self.at)


def test_a_gpu_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a double of torch's events, and torch's own records of what a profiler saw."""
    import torch
    from torch.autograd import DeviceType
    from torch.autograd.profiler_util import FunctionEvent

    assert "enable_timing" in inspect.signature(torch.cuda.Event.__new__).parameters
    for name in ("record", "synchronize", "elapsed_time"):
        own, double = (
            inspect.signature(getattr(kind, name)) for kind in (torch.cuda.Event, FakeEvent)
        )
        assert list(own.parameters) == list(double.parameters), name
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    clock = CudaClock()
    assert clock.between([clock.mark() for _ in range(3)]) == [0.003, 0.005]

    def event(name: str, start: float, end: float, device: Any, **others: Any) -> FunctionEvent:
        return FunctionEvent(1, name, 1, start, end, device_type=device, **others)

    class Profile:
        def __init__(self, activities: Any) -> None:
            assert activities == [torch.profiler.ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *error: object) -> None: ...

        def events(self) -> list[FunctionEvent]:
            return found

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    found = [
        event("kernel", 100, 150, DeviceType.CUDA),
        event("Memcpy HtoD", 140, 160, DeviceType.CUDA),
        event("cudaLaunchKernel", 0, 1000, DeviceType.CPU),
        event("my range", 0, 900, DeviceType.CUDA, is_user_annotation=True),
    ]
    assert clock.busy(lambda: None) == pytest.approx(60e-6)
    assert len(waits) == 2
    found = []  # the profiler is not allowed here
    assert clock.busy(lambda: None) is None


def test_derived_figures() -> None:
    machine = {"memory": {"bytes_per_s": 1000.0}, "matmul": {"flops_per_s": 1e6}}
    outcome = Outcome(Part("x", "engine", 1))
    outcome.take(start_facts(REPORT, MODEL), ["start"])
    outcome.take({"step_s": 6.0, "kv_tokens": 4.0}, ["decode", "2"])
    outcome.take({"seconds": 0.5}, ["prompt", "5"])
    derive(outcome, ["decode", "2"], machine)
    derive(outcome, ["prompt", "5"], machine)
    assert outcome.result["decode"]["2"]["floor_s"] == 2.0
    assert outcome.result["decode"]["2"]["times_floor"] == 3.0
    assert outcome.result["prompt"]["5"]["tokens_per_s"] == 10
    assert outcome.result["prompt"]["5"]["flops_share"] == pytest.approx(9760 / 0.5 / 1e6)
    derive(outcome, ["decode", "2"], {})  # the device's facts failed
    (line,) = told(outcome, ["decode", "2"])
    assert line == "x: batch 2: 6000 ms a step, 3.00 x floor of 2000 ms"


# ---- time limit ----------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def named(*estimates: float) -> list[Part]:
    return [Part(f"part {number}", "engine", each) for number, each in enumerate(estimates)]


def test_parts_that_do_not_fit_are_skipped_and_later_ones_may_fit() -> None:
    clock = Clock()
    done: list[tuple[str, float]] = []

    def perform(part: Part, limit: float, outcome: Outcome) -> None:
        done.append((part.name, limit))
        clock.now += part.estimate

    outcomes = Schedule(100, clock).run(named(30, 50, 30, 10), perform)
    assert [outcome.status for outcome in outcomes] == ["done", "done", "skipped", "done"]
    assert outcomes[2].error == "30 s of 17 s left"
    assert [name for name, _ in done] == ["part 0", "part 1", "part 3"]
    assert [limit for _, limit in done] == [97, 67, 17]
    assert [outcome.seconds for outcome in outcomes] == [30, 50, 0, 10]


def test_expectations_follow_what_parts_took() -> None:
    clock = Clock()

    def perform(part: Part, limit: float, outcome: Outcome) -> None:
        clock.now += 2 * part.estimate  # this machine is slow

    schedule = Schedule(100 + RESERVE_S, clock)
    outcomes = schedule.run(named(10, 10, 10, 25, 10), perform)
    assert [outcome.status for outcome in outcomes] == ["done"] * 3 + ["skipped", "done"]
    assert outcomes[3].error == "50 s of 40 s left"
    assert schedule.left() == 20


def test_a_failure_costs_itself_and_ctrl_c_the_rest() -> None:
    clock = Clock()
    ended: list[str] = []

    def perform(part: Part, limit: float, outcome: Outcome) -> None:
        if part.name == "part 0":
            outcome.take(1.0, ["decode", "1"])
            raise PartError("no such kernel")
        if part.name == "part 2":
            raise KeyboardInterrupt

    schedule = Schedule(100, clock)
    outcomes = schedule.run(
        named(1, 1, 1, 1), perform, lambda outcome: ended.append(outcome.status)
    )
    assert ended == ["failed", "done", "interrupted", "skipped"]
    assert outcomes[0].error == "no such kernel"
    assert outcomes[0].result == {"decode": {"1": 1.0}}
    assert outcomes[3].error == "interrupted"


def test_a_sequence_lasts_through_all_steps_of_a_part() -> None:
    for part in [*parts.full_parts(), *parts.quick_parts("cuda"), *parts.quick_parts("cpu")]:
        if part.kind in ("engine", "overlap"):
            given = part.given
            filling = -(
                -max(given["batches"]) * given["context"] // given["max_num_batched_tokens"]
            )
            steps = len(given["batches"]) * (given["warm"] + given["steps"] + 8) + 2 * filling
            assert steps < ROOM


def test_every_backend_meets_every_graph_runner() -> None:
    names = {part.name for part in parts.full_parts()}
    for model in ("llama-1b", "demo"):
        for attention in ("flashinfer", "triton", "mixed"):
            for runner in ("eager", "triton", "compile", "cuda_graph"):
                assert f"{model} {attention} {runner}" in names
        assert {f"{model} torch eager", f"overlap {model}"} <= names
    assert {"compare attention", "compare graph"} <= names
    assert len(names) == len(parts.full_parts())


# ---- the process ---------------------------------------------------------------------------------

PLANTED = """
import os, sys, time
from octavo.bench.gpu import measure
from octavo.bench.child import serve
from octavo.bench.gpu.child import perform, spoiled
from octavo.core.errors import ConfigError

def do_good(given, device, tell):
    tell(os.getpid(), "pid")
    tell(device, "deep", "device")

def do_refused(given, device, tell):
    raise ConfigError("no such option", path="graph.runner")

def do_bug(given, device, tell):
    raise ValueError("of all things")

def do_crash(given, device, tell):
    tell(1, "before")
    os.abort()

def do_leave(given, device, tell):
    sys.exit(7)

def do_hang(given, device, tell):
    tell(2, "before")
    time.sleep(600)

measure.PARTS.update({k[3:]: v for k, v in globals().items() if k.startswith("do_")})
serve(int(sys.argv[1]), int(sys.argv[2]), perform, spoiled=spoiled)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "planted_child.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    made = DeviceChild("cpu", module="planted_child")
    yield made
    made.close()


def do(child: DeviceChild, kind: str, limit: float = 120.0) -> tuple[dict[str, Any], str]:
    """The figures, and the error."""
    outcome = Outcome(Part(kind, kind, 1))
    try:
        child.perform(outcome.part, limit, outcome)
    except PartError as error:
        return outcome.result, str(error)
    return outcome.result, ""


def test_a_process_outlives_what_was_refused_but_no_accident(child: DeviceChild) -> None:
    found, error = do(child, "good")
    assert (found["deep"], error) == ({"device": "cpu"}, "")
    assert do(child, "refused") == ({}, "graph.runner: no such option")
    assert do(child, "good")[0]["pid"] == found["pid"]
    assert do(child, "bug") == ({}, "ValueError: of all things")
    assert do(child, "good")[0]["pid"] != found["pid"]
    assert do(child, "crash") == ({"before": 1}, "the process ended with SIGABRT")
    assert do(child, "leave") == ({}, "the process ended with status 7")
    assert do(child, "good")[1] == ""  # it runs again: the next time limit is not for its start
    assert do(child, "hang", 2.0) == ({"before": 2}, "cut off after 2 s")
    assert do(child, "good")[1] == ""


# ---- the table -----------------------------------------------------------------------------------


def engine(name: str, batches: list[int], **others: Any) -> Outcome:
    model = name.split(maxsplit=1)[0]
    given = {"model": model, "batches": batches, "prompts": [2048, 8000], "context": 1024}
    outcome = Outcome(Part(name, "engine", 1, given), status="done", **others)
    outcome.take({"seconds": 12.34}, ["start"])
    return outcome


def decoded(outcome: Outcome, batch: int, step_s: float, floor_s: float) -> None:
    value = {"step_s": step_s, "floor_s": floor_s, "times_floor": step_s / floor_s}
    outcome.take(value, ["decode", str(batch)])


def full_table() -> list[Outcome]:
    facts = Outcome(Part("device", "facts", 1), status="done")
    facts.take({"name": "NVIDIA H200", "capability": [9, 0]}, ["device"])
    facts.take({"read": {"1": 4.1e12}, "copy": {"1": 3.9e12, "2": 4e12}}, ["memory"])
    facts.take({"dtype": "bfloat16", "flops_per_s": 7e14}, ["matmul"])
    good = engine("llama-1b flashinfer cuda_graph", [1, 32, 256])
    for batch, step in ((1, 0.0007), (32, 0.0123), (256, 0.25)):
        decoded(good, batch, step, step / 1.25)
    for length in (2048, 8000):
        good.take({"tokens_per_s": 123456.0, "flops_share": 0.456}, ["prompt", str(length)])
    torn = engine("llama-1b triton compile", [1, 32, 256], error="cut off\n after 60 s")
    torn.status = "failed"
    decoded(torn, 1, 0.001, 0.0005)
    small = engine("demo torch eager", [1, 32])
    decoded(small, 1, 0.001, 0.00001)
    decoded(small, 32, 0.001, 0.000001)
    for length in (2048, 8000):
        small.take({"tokens_per_s": 99.0}, ["prompt", str(length)])
    between = engine("demo triton eager", [1, 32, 256], error="the process ended by signal SIGSEGV")
    between.status, between.result = "failed", {}
    late = Outcome(Part("overlap demo", "overlap", 1), error="50 s of 9 s left")
    return [facts, good, small, torn, between, late]


def test_the_table() -> None:
    lines = table.lines(full_table(), {"torch": "2.11.0", "triton": "3.6.0", "numpy": "2"})
    assert lines[1:] == [
        "NVIDIA H200 (sm 9.0); torch 2.11.0, triton 3.6.0",
        "read 4,100 GB/s, copy 4,000 GB/s, matmul bfloat16 700.0 TFLOP/s",
        "decode: ms a step and times its floor, context 1024",
        "prompts: 1000 tokens/s and share of the matmul rate; start: s",
        "model attention runner              batch 1     batch 32    batch 256"
        " 2048 tokens 8000 tokens start",
        "llama-1b floor                  0.56         9.84          200",
        "llama-1b flashinfer cuda_graph  0.70  1.25x  12.3  1.25x   250  1.25x"
        "  123.5  46%  123.5  46%  12.3",
        "llama-1b triton compile         1.00  2.00x  error: cut off after 60 s",
        "demo floor                      0.01         0.00",
        "demo torch eager                1.00   100x  1.00  1000x            -"
        "    0.1         0.1       12.3",
        "demo triton eager               error: the process ended by signal SIGSEGV",
        "skipped: overlap demo",
    ]
    assert all(len(line) <= table.WIDTH for line in lines)


def test_the_table_of_everything_is_short() -> None:
    outcomes = [Outcome(part, "failed", error="x " * 90) for part in parts.full_parts()]
    lines = table.lines(outcomes, {})
    assert len(lines) < 50
    assert all(len(line) <= table.WIDTH for line in lines)
    for outcome in outcomes[1:]:
        assert any(line.startswith(outcome.part.name) for line in lines)


def test_the_table_of_nothing() -> None:
    outcomes = [Outcome(part) for part in parts.full_parts()]
    text = " ".join(table.lines(outcomes, {}))
    assert all(outcome.part.name in " ".join(text.split()) for outcome in outcomes)


def steps(wall: float, device: float) -> dict[str, Any]:
    phases = {"schedule": 0.0001, "prepare": 0.0002, "launch": 0.0003, "commit": 0.0004}
    return {"step_s": wall, "device_s": device, "kv_tokens": 10.0, "phases_s": phases}


def test_overlap_in_the_table() -> None:
    outcome = Outcome(Part("overlap demo", "overlap", 1, {}), status="done")
    start = start_facts(REPORT, MODEL) | {"seconds": 9.0}
    for number, wall, device in (("1", 0.003, 0.0021), ("2", 0.0022, 0.002)):
        outcome.take(start, ["start", number])
        outcome.take(steps(wall, device), ["steps", "32", number])
        derive(outcome, ["steps", "32", number], {})
    assert outcome.result["steps"]["32"]["2"]["hidden"] == pytest.approx(0.8)
    assert "hidden" not in outcome.result["steps"]["32"]["1"]
    assert table.lines([outcome], {})[1:] == [
        "overlap demo batch 32: in flight 1 3.00 ms, in flight 2 2.20 ms, device 2.00, hidden 80%",
        "  host ms: schedule prepare launch commit: 0.10 0.20 0.30 0.40",
        "  start 9.0 s: load weights 1.5, 35 graphs 77 MiB (estimated 80)",
    ]
    outcome.take(steps(0.002, 0.002), ["steps", "64", "1"])
    assert "in flight 1 2.00 ms, device 2.00, hidden ?" in " ".join(table.lines([outcome], {}))
    outcome.take(steps(0.002, 0.002), ["steps", "64", "2"])
    derive(outcome, ["steps", "64", "2"], {})  # the device is busy all the time
    assert "device 2.00, hidden ?" in " ".join(table.lines([outcome], {}))


def test_host_phases() -> None:
    class Executor:
        def submit(self, plan: int) -> int:
            return plan + 1

        def sample(self, ticket: int, masks: None) -> None:
            raise ValueError("no")

        def collect(self, ticket: int) -> int:
            return ticket

    executor = Executor()
    with Watch(executor) as watch:  # type: ignore[arg-type]
        assert executor.submit(1) == 2
        with pytest.raises(ValueError, match="no"):
            executor.sample(1, None)
    assert not vars(executor)
    assert watch.seconds["submit"] > 0
    assert watch.seconds["sample"] > 0
    assert watch.seconds["collect"] == 0
    watch.seconds = {"submit": 0.004, "sample": 0.002, "collect": 0.006}
    own = {name: {"mean_ms": 1.0} for name in ("schedule", "prepare", "commit")}
    assert watch.phases(own, 2) == pytest.approx(
        {"schedule": 0.001, "prepare": 0.001, "launch": 0.002, "wait": 0.003, "commit": 0.001}
    )


# ---- the command ---------------------------------------------------------------------------------


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(given)


def test_parts_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = command.chosen_parts(arguments("--only", "overlap"))
    assert [part.name for part in chosen] == ["device", "overlap llama-1b", "overlap demo"]
    with pytest.raises(ConfigError, match="no measurement matches; available: device, "):
        command.chosen_parts(arguments("--only", "overlapp"))
    assert command.main(arguments("--list", "--only", "compare")) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    with pytest.raises(ConfigError, match="requires --quick"):
        command.main(arguments("--device", "cpu"))


def test_without_a_device(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(command, "_has_cuda", lambda: False)
    assert command.main(arguments()) == 2
    assert "no CUDA device is here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_a_cpu(tmp_path: Path) -> None:
    """Everything that a GPU would do, with a tiny model: engines, overlap, a comparison."""
    file = tmp_path / "out.json"
    done = subprocess.run(
        [*COMMAND, "--device", "cpu", "--quick", "--json", str(file)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    found = {part["name"]: part for part in result["parts"]}
    wrong = {name: part["error"] for name, part in found.items() if part["error"]}
    assert not wrong
    assert found["device"]["result"]["memory"]["bytes_per_s"] > 1e6
    for name in ("tiny torch eager", "tiny flex eager", "tiny cpu eager"):
        figures = found[name]["result"]
        assert figures["start"]["chosen"]["attention_backend"] == name.split()[1]
        for batch in (1,) if "flex" in name else (1, 2, 4):
            step = figures["decode"][str(batch)]
            assert step["times_floor"] == pytest.approx(step["step_s"] / step["floor_s"])
            assert step["floor_s"] > 0
            assert len(step["steps_s"]) == 4
            # 24 tokens and those since: more for the first rows
            assert 24 * batch < step["kv_tokens"] < 48 * batch
        assert figures["prompt"]["32"]["tokens_per_s"] > 1
        assert figures["prompt"]["32"]["flops_share"] > 0
    both = found["overlap tiny"]["result"]["steps"]
    assert set(both) == {"2", "4"}
    assert all(set(each) == {"1", "2"} and "hidden" in each["2"] for each in both.values())
    comparison = found["compare attention"]["result"]["comparison"]
    assert comparison["checks"][0]["greedy"]["num_identical"] == 2
    assert "tiny flex eager: batch 1: " in done.stdout
    last = done.stdout.partition("=" * table.WIDTH)[2].splitlines()
    assert any(line.startswith("tiny cpu eager ") for line in last)
    assert any("greedy outputs 2 of 2 equal" in line for line in last)


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that nobody reaps."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_nothing_outlives_a_command_that_is_killed() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--device", "cpu", "--quick", "--only", "compare"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        tasks = Path(f"/proc/{process.pid}/task")
        children = [int(pid) for f in tasks.glob("*/children") for pid in f.read_text().split()]
        process.kill()
    assert len(children) == 1
    until = time.monotonic() + 60
    while any(map(runs, children)):
        assert time.monotonic() < until, "the process still runs"
        time.sleep(0.05)


@pytest.mark.slow
def test_ctrl_c_prints_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    process = subprocess.Popen(
        [*COMMAND, "--device", "cpu", "--quick", "--only", "flex", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if "flex eager: start" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "tiny flex eager: interrupted" in rest
    table_ = rest.partition("=" * table.WIDTH)[2]
    assert "error: interrupted" in table_
    states = [part["status"] for part in json.loads(file.read_text())["parts"]]
    assert states == ["done", "interrupted"]
