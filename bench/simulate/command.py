"""`octavo simulate`: the command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.bench.arguments import positive, positive_float, slo
from octavo.bench.environment import peak_rss_bytes
from octavo.bench.result_file import write_json
from octavo.bench.simulate.replay import Replay, result
from octavo.bench.simulate.report import lines
from octavo.bench.simulate.setup import simulated_engine
from octavo.bench.simulate.traces import (
    FORMATS,
    TraceError,
    TraceRequest,
    guess_format,
    read_trace,
    shaped,
    synthetic,
)
from octavo.bench.slo import Slo
from octavo.core.errors import ConfigError
from octavo.frontend.config import load_config
from octavo.server.command_line.config import registry_from_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "configs", nargs="+", metavar="CONFIG.yaml", help="configurations to replay the trace on"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override a key in every configuration, as in `octavo serve`; repeatable",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", metavar="FILE", type=Path, help="trace to replay")
    source.add_argument(
        "--synthetic", metavar="N", type=positive, help="replay N generated requests"
    )
    parser.add_argument("--format", choices=[*FORMATS], help="trace format (default: detected)")
    parser.add_argument(
        "--speedup",
        type=positive_float,
        default=1.0,
        metavar="X",
        help="speed up arrivals by a factor of X",
    )
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N requests")
    parser.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help="ignore arrival times and keep N requests in flight",
    )
    parser.add_argument(
        "--max-output", type=positive, metavar="N", help="limit outputs to N tokens"
    )
    parser.add_argument(
        "--users",
        type=positive,
        default=0,
        metavar="N",
        help="distribute the requests among N users",
    )
    parser.add_argument(
        "--slo",
        type=slo,
        default=Slo(),
        metavar="ttft=S,itl=S,e2e=S",
        help="what counts as good, in seconds or as 50ms: time to first token, mean time between "
        "a request's tokens, arrival to end",
    )
    made = parser.add_argument_group("synthetic requests")
    made.add_argument("--rate", type=positive_float, default=10.0, help="requests per second (10)")
    made.add_argument("--input-len", type=positive, default=512, help="mean prompt tokens (512)")
    made.add_argument("--output-len", type=positive, default=128, help="mean output tokens (128)")
    made.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all results as JSON")
    parser.add_argument(
        "--report", metavar="FILE.html", type=Path, help="write an HTML report with plots"
    )


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    for file in (args.json, args.report):
        if file is not None and not file.resolve().parent.is_dir():
            raise ConfigError(f"cannot write '{file}': its folder does not exist")
    if args.trace is not None and args.format is None:
        args.format = guess_format(args.trace)
    names = _names(args.configs)
    results = []
    for name, file in zip(names, args.configs, strict=True):
        results.append(simulate(name, file, args))
    whole = {
        "benchmark": "simulate",
        "trace": "synthetic" if args.trace is None else str(args.trace),
        "format": args.format,
        "speedup": args.speedup,
        "limit": args.limit,
        "concurrency": args.concurrency,
        "max_output": args.max_output,
        "results": results,
    }
    print("\n".join(lines(whole)))
    if args.json is not None:
        write_json(args.json, whole)
    if args.report is not None:
        from octavo.bench.simulate.page import page

        args.report.write_text(page(whole), encoding="utf-8")
    return 0


def _names(files: Sequence[str]) -> list[str]:
    """Short names of the configurations, distinct."""
    stems = [Path(file).stem for file in files]
    return [
        stem if stems.count(stem) == 1 else f"{stem} ({number})"
        for number, stem in enumerate(stems, start=1)
    ]


def simulate(name: str, file: str, args: argparse.Namespace) -> dict[str, Any]:
    """Replay the trace with one configuration."""
    started = time.perf_counter()
    config = load_config(file, overrides=args.overrides)
    engine = simulated_engine(config, registry_from_config(config))
    try:
        replay = Replay(engine, args.slo, args.concurrency)
        with _progress(name, args) as tell:
            replay.run(requests_of(args), tell)
        found = result(replay, name)
        if not found["requests"]["total"]:
            raise TraceError(f"the trace '{args.trace}' contains no requests")
    finally:
        engine.core.close()
    elapsed = time.perf_counter() - started
    return found | {"wall_s": elapsed, "peak_rss_bytes": peak_rss_bytes()}


def requests_of(args: argparse.Namespace) -> Iterator[TraceRequest]:
    """What the command line asks to replay."""
    if args.trace is not None:
        source = read_trace(args.trace, args.format)
    else:
        source = synthetic(args.synthetic, args.rate, args.input_len, args.output_len, args.seed)
    return shaped(source, args.speedup, args.limit, args.users, args.max_output)


@contextmanager
def _progress(name: str, args: argparse.Namespace) -> Iterator[Any]:
    """A count of requests on stderr, when that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    total = args.synthetic if args.limit is None else args.limit
    with tqdm(total=total, unit="req", desc=name) as bar:
        yield lambda count: bar.update(count - bar.n) if count > bar.n + 50 else None
