"""`octavo bench startup`: seconds from the command until an engine has made its first token.

Every start is a process of its own. Cold starts have an empty folder for converted weights and
compiled kernels (the system's page cache stays as it is); warm ones find what a start before left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.bench.arguments import natural, positive, writable
from octavo.bench.environment import machine, versions
from octavo.bench.load.answers import distribution
from octavo.bench.result_file import write_json
from octavo.core import envvars
from octavo.core.errors import OctavoError

LIMIT_S = 3600


class StartError(OctavoError):
    """An engine did not start; the message has its last lines."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's names, and the flags of `serve` for the model and its engine."""
    from octavo.server.command_line.config import add_config_arguments

    add_config_arguments(parser)
    own = parser.add_argument_group("benchmark")
    own.add_argument(
        "--num-iters-cold", type=natural, default=1, help="starts with empty caches (1)"
    )
    own.add_argument("--num-iters-warmup", type=natural, default=1, help="warm-up starts (1)")
    own.add_argument("--num-iters-warm", type=positive, default=3, help="measured warm starts (3)")
    own.add_argument(
        "--output-json", "--json", metavar="FILE", type=writable, help="write the results as JSON"
    )


def start_once(config: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Start an engine in a process: `imports_s`, `total_s`, and the phases of the report. Raises
    `StartError`."""
    environment = os.environ | {envvars.CACHE_DIR.name: str(cache)}
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out.json"
        command = [sys.executable, "-m", "octavo.bench.startup", str(out)]
        began = time.time()
        done = subprocess.run(
            command,
            input=json.dumps({"config": config, "began": began}),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            env=environment,
            check=False,
        )
        if done.returncode or not out.exists():
            last = done.stderr.strip().splitlines()[-3:]
            raise StartError(f"the engine did not start: {' '.join(last) or done.returncode}")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def child(out: Path, given: dict[str, Any]) -> None:
    """In the process: start, generate one token, write how long it took. The clocks of both
    processes are the system's, so that the interpreter's own start counts."""
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.frontend.assembly import configure

    config, registry = configure(config=given["config"])
    resolved = resolve(config, registry)
    configured = time.time()
    engine = build_engine(resolved, registry)
    ready = time.time()
    try:
        from octavo.bench.load.engine import EngineDriver
        from octavo.bench.workloads.calls import Call

        run = EngineDriver(engine).run([Call(1, token_ids=(1, 2, 3))])
        if run.answers[0].error is not None:
            raise StartError(run.answers[0].error)
        began = given["began"]
        phases = {f"{name}_s": seconds for name, seconds in engine.report.phases.items()}
        result = {
            "configuration_s": configured - began,
            "engine_s": ready - configured,
            "first_token_s": run.answers[0].e2e,
            "total_s": ready - began + run.answers[0].e2e,
            "phases": phases,
        }
    finally:
        engine.close()
    out.write_text(json.dumps(result))


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    from octavo.engine.resolve import resolve
    from octavo.server.command_line.config import config_from_args

    config, registry = config_from_args(args)
    resolve(config, registry)  # what is wrong with it is said here, once
    plain = config.model_dump(mode="json", exclude_unset=True)
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for number in range(args.num_iters_cold):
        with tempfile.TemporaryDirectory() as empty:
            runs["cold"].append(_told(f"cold start {number + 1}", plain, Path(empty)))
    cache = envvars.CACHE_DIR.get()
    for _ in range(args.num_iters_warmup):
        _told("warm-up", plain, cache)
    for number in range(args.num_iters_warm):
        runs["warm"].append(_told(f"warm start {number + 1}", plain, cache))
    result = {"benchmark": "startup", "model": config.model.source, **_summary(runs)}
    print("\n".join(lines(result)))
    if args.output_json is not None:
        result |= {"config": plain, "versions": versions(), "machine": machine()}
        write_json(args.output_json, result)
    return 0


def _told(what: str, config: dict[str, Any], cache: Path) -> dict[str, Any]:
    found = start_once(config, cache)
    print(f"{what}: {found['total_s']:.2f} s", file=sys.stderr)
    return found


def _summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Distributions of every figure, and the single runs."""
    out: dict[str, Any] = {}
    for kind, found in runs.items():
        if found:
            names = [name for name in found[0] if name != "phases"]
            flat = [{n: run[n] for n in names} | run["phases"] for run in found]
            out[kind] = {n: distribution([run.get(n, 0.0) for run in flat]) for n in flat[0]}
            out[f"{kind}_runs"] = found
    return out


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    kinds = [kind for kind in ("cold", "warm") if kind in result]
    heads = [f"{kind} ({len(result[f'{kind}_runs'])})" for kind in kinds]
    out = [f"{result['model']}: seconds of a start, median"]
    out.append(f"  {'':26s}" + "".join(f"{head:>12s}" for head in heads))
    titles = {
        "total_s": "until the first token",
        "configuration_s": "  interpreter, configuration",
        "engine_s": "  engine",
        "first_token_s": "  first token",
    }
    every = dict.fromkeys(name for kind in kinds for name in result[kind])
    for name in [*titles, *(n for n in every if n not in titles)]:
        title = titles.get(name, "    " + name.removesuffix("_s"))
        cells = [result[kind].get(name, {}).get("p50") for kind in kinds]
        out.append(f"  {title:26s}" + "".join(f"{_cell(cell):>12s}" for cell in cells))
    return out


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    child(Path(sys.argv[1]), json.loads(sys.stdin.read()))
