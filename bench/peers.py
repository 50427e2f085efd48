"""`octavo bench peers`: the same work on this CPU, by Octavo, by another engine, and at best.

Each engine has a process of its own with the model loaded; they take turns, a round each, and are
idle otherwise, so that both meet the machine in the same state. The floor is what memory and
arithmetic of the machine allow, measured in the same run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import IO, Any

from octavo.bench.arguments import natural, positive, writable
from octavo.bench.environment import machine, versions
from octavo.bench.floor import Machine, Work, decode_floor, floor, measure_machine
from octavo.bench.result_file import write_json
from octavo.bench.workload import Shape
from octavo.core.errors import ConfigError, OctavoError

PEERS = ("transformers",)


class PeerError(OctavoError):
    """An engine's process ended; the message has its last lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags, and those of `serve` for the model and its engine."""
    from octavo.server.command_line.config import add_config_arguments

    add_config_arguments(parser)
    own = parser.add_argument_group("benchmark")
    own.add_argument(
        "--num-prompts", type=positive, nargs="+", default=[1, 8, 32], help="batch sizes (1 8 32)"
    )
    own.add_argument(
        "--input-len", type=positive, default=128, help="prompt length in tokens (128)"
    )
    own.add_argument(
        "--output-len", type=positive, default=64, help="output tokens per request (64)"
    )
    own.add_argument("--rounds", type=positive, default=1, help="rounds; the best one counts (1)")
    own.add_argument(
        "--warm-up-len", type=natural, default=16, help="prompt length of the warm-up run (16)"
    )
    own.add_argument(
        "--peers", nargs="*", choices=PEERS, default=list(PEERS), help="engines to compare with"
    )
    own.add_argument("--json", metavar="FILE", type=writable, help="write the results as JSON")


class Child:
    """An engine in its process. about: what it says of itself when it is ready."""

    def __init__(self, process: subprocess.Popen[str], settings: dict[str, Any]) -> None:
        self._process, self._name = process, settings["engine"]
        self.about = self._ask(settings)

    def run(self, shape: Shape, seed: int) -> dict[str, float]:
        """Seconds of the work."""
        sizes = (shape.num_prompts, shape.input_len, shape.output_len)
        found: dict[str, float] = self._ask({"shape": sizes, "seed": seed})
        return found

    def _ask(self, message: dict[str, Any]) -> Any:
        to, answers = self._process.stdin, self._process.stdout
        assert to is not None, "made with pipes"
        assert answers is not None, "made with pipes"
        try:
            to.write(json.dumps(message) + "\n")
            to.flush()
        except BrokenPipeError:
            pass  # its end has a reason, which is told below
        line = answers.readline()
        if not line:
            raise PeerError(f"{self._name} ended: see its messages above")
        return json.loads(line)


@contextmanager
def child(settings: dict[str, Any], errors: IO[str] | None = None) -> Iterator[Child]:
    """A running engine, ended afterwards. errors: where its messages go, default stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo.bench.peers_child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    try:
        yield Child(process, settings)
    finally:
        assert process.stdin is not None, "made with pipes"
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def work_of(report: Mapping[str, Any], model: Mapping[str, Any]) -> Work:
    """What a token of a decoder goes through: all parameters, the head (as large as the embedding)
    apart from the layers. report: Octavo's. model: config.json."""
    head = model["vocab_size"] * model["hidden_size"]
    tied = bool(model.get("tie_word_embeddings"))
    layers = report["num_parameters"] - head * (1 if tied else 2)
    each = report["weight_bytes"] / report["num_parameters"]
    return Work(layers, head, int(layers * each), int(head * each))


def measure_rows(
    engines: Mapping[str, Child],
    args: argparse.Namespace,
    limits: Machine | None,
    work: Work,
) -> list[dict[str, Any]]:
    """One row a number of prompts: the best round of each engine, and the floor."""
    rows = []
    for num in args.num_prompts:
        shape = Shape(num, args.input_len, args.output_len)
        best: dict[str, dict[str, float]] = {}
        for number in range(args.rounds):
            for name, engine in engines.items():
                found = engine.run(shape, number)
                if name not in best or found["elapsed_s"] < best[name]["elapsed_s"]:
                    best[name] = found
        row: dict[str, Any] = {"num_prompts": num, "engines": best}
        if limits is not None:
            row["floor"] = {
                "elapsed_s": floor(limits, work, shape),
                "decode_s": (shape.output_len - 1) * decode_floor(limits, work, num),
            }
        rows.append(row)
    return rows


def lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The result for people: output tokens a second, with the prompts and in decode alone."""
    size, limits = result["workload"], result["limits"]
    yield (
        f"{result['model']}, {size['input_len']} tokens in, {size['output_len']} out, "
        f"best of {size['rounds']}, {result['threads']} threads"
    )
    if limits is not None:
        yield (
            f"  this machine: {limits['bytes_per_s'] / 1e9:.1f} GB/s, "
            f"{limits['flops'] / 1e9:.0f} GFLOP/s ({limits['isa']})"
        )
    yield f"  {'requests':>8s}  {'engine':14s}{'output tokens/s':>16s}{'decode alone':>14s}"
    for row in result["rows"]:
        named = {**row["engines"], **({"floor": row["floor"]} if "floor" in row else {})}
        for name, seconds in named.items():
            whole = row["num_prompts"] * size["output_len"] / seconds["elapsed_s"]
            tokens = row["num_prompts"] * (size["output_len"] - 1)
            alone = tokens / seconds["decode_s"] if seconds["decode_s"] > 0 else float("nan")
            yield f"  {row['num_prompts']:8d}  {name:14s}{whole:16.1f}{alone:14.1f}"


def _checkpoint(source: Any, peers: Sequence[str]) -> str:
    """The folder that other engines load."""
    if not peers:
        return ""
    folder = source.tokenizer_dir()
    next(iter(source.tensors()))  # a converted checkpoint is there now
    if folder is None or not (folder / "config.json").exists():
        raise ConfigError("other engines need a model folder with config.json and tokenizer files")
    return str(folder)


def main(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line asks for. Returns the exit status."""
    from octavo.engine.resolve import resolve
    from octavo.server.command_line.config import config_from_args

    for name in args.peers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--peers {name}: the package is not installed")
    config, registry = config_from_args(args)
    resolved = resolve(config, registry)
    if resolved.platform.device != "cpu":
        raise ConfigError("bench peers compares engines on a CPU", path="executor.device")
    folder = _checkpoint(resolved.weight_source, args.peers)
    threads = resolved.config.executor.num_threads
    assert isinstance(threads, int), "resolve settles the threads"
    limits = measure_machine(threads)
    with ExitStack() as stack:
        own = {"engine": "octavo", "config": config.model_dump(mode="json", exclude_unset=True)}
        engines = {"octavo": stack.enter_context(child(own))}
        for name in args.peers:
            settings = {"engine": name, "folder": folder, "threads": threads}
            engines[name] = stack.enter_context(child(settings))
        if args.warm_up_len:
            for engine in engines.values():
                engine.run(Shape(2, args.warm_up_len, 2), 2**31)
        report = engines["octavo"].about
        rows = measure_rows(engines, args, limits, work_of(report, resolved.model_config))
    result = {
        "benchmark": "peers",
        "model": resolved.config.model.source,
        "workload": {
            "input_len": args.input_len,
            "output_len": args.output_len,
            "rounds": args.rounds,
        },
        "threads": threads,
        "limits": vars(limits),
        "rows": rows,
        "startup": report,
        "versions": versions(),
        "machine": machine(),
    }
    print("\n".join(lines(result)))
    if args.json is not None:
        write_json(args.json, result)
    return 0
