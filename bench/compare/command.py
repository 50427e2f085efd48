"""`octavo compare`: the command."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from octavo.bench.arguments import natural, positive, positive_float, slo, writable
from octavo.bench.compare.conditions import condition, failures
from octavo.bench.compare.session import Plan, Session
from octavo.bench.compare.sides import EngineSide, ServerSide, Side, names_of
from octavo.bench.compare.table import difference_lines, lines
from octavo.bench.environment import machine, versions
from octavo.bench.result_file import write_json
from octavo.bench.slo import Slo
from octavo.bench.workloads.spec import add_workload_arguments, spec_from_args
from octavo.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument(
        "configs",
        nargs="*",
        metavar="CONFIG.yaml[+key=value...]",
        help="a side: an engine built from this file, with overrides for this side only",
    )
    add = parser.add_argument
    add(
        "--url",
        action="append",
        default=[],
        metavar="URL",
        help="a side: a running server of the "
        "OpenAI protocol; may be repeated, comes after the files",
    )
    add(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override a key in every file, as in `octavo serve`; repeatable",
    )
    add(
        "--serve",
        action="store_true",
        help="start a server for each file and measure over HTTP",
    )
    add(
        "--model",
        metavar="NAME",
        help="model name to request from --url servers (default: the first one listed)",
    )
    add("--api-key", metavar="KEY", help="API key for servers")
    add(
        "--vocab-size",
        type=positive,
        help="vocabulary size of the servers' model (default: probed)",
    )
    add_workload_arguments(parser)
    own = parser.add_argument_group("measuring")
    add = own.add_argument
    add(
        "--rounds",
        type=positive,
        default=8,
        help="rounds per side (8); fewer than 6 cannot be significant",
    )
    add("--noise-rounds", type=natural, default=2, help="A/A rounds that estimate the noise (2)")
    add("--warm-up", type=natural, default=1, help="warm-up rounds, not counted (1)")
    add(
        "--restart-every",
        type=natural,
        default=0,
        metavar="N",
        help="restart the processes after every N rounds (0: never)",
    )
    add(
        "--time-limit",
        type=positive_float,
        default=240.0,
        metavar="SECONDS",
        help="time limit in seconds; rounds, then requests, are reduced to stay within it (240)",
    )
    add(
        "--slo",
        type=slo,
        default=Slo(),
        metavar="ttft=S,itl=S,e2e=S",
        help="latency targets for goodput, in seconds or as 50ms",
    )
    add(
        "--min-effect",
        type=float,
        default=0.01,
        metavar="X",
        help="smallest relative difference worth reporting (0.01)",
    )
    add(
        "--check-prompts",
        type=natural,
        default=8,
        help="prompts whose greedy outputs are compared (8; 0: none)",
    )
    add("--check-tokens", type=positive, default=32, help="output tokens compared per prompt (32)")
    add(
        "--check-samples",
        type=natural,
        default=128,
        help="samples per prompt for the sampling test (128; 0: none)",
    )
    out = parser.add_argument_group("results")
    out.add_argument(
        "--report", metavar="OUT.html", type=writable, help="write an HTML report with plots"
    )
    out.add_argument("--json", metavar="OUT.json", type=writable, help="write all results as JSON")
    out.add_argument(
        "--fail-if",
        metavar="METRIC>X",
        type=condition,
        action="append",
        default=[],
        help="exit with 1 when the ratio to the first side is such: ttft_p99>1.05, "
        "output_tokens_per_s.high<1 (end of the interval), output_errors>0; may be repeated",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when a `--fail-if` holds."""
    sides = make_sides(args)
    spec = spec_from_args(args)
    plan = Plan(
        rounds=args.rounds,
        noise_rounds=args.noise_rounds,
        warm_up=args.warm_up,
        restart_every=args.restart_every,
        time_limit_s=args.time_limit,
        slo=args.slo,
        min_effect=args.min_effect,
        check_prompts=args.check_prompts,
        check_tokens=args.check_tokens,
        check_samples=args.check_samples,
    )
    began = time.perf_counter()
    session = Session(sides, spec, plan, tell=_tell, shown=sys.stderr.isatty())
    try:
        session.start()
        _tell("\n".join(difference_lines(session.result_of_start())))
        result = session.run()
    finally:
        for side in sides:
            side.close()
    failed = failures(args.fail_if, result)
    result |= {
        "seconds": time.perf_counter() - began,
        "fail_if": [asdict(c) | {"text": c.text} for c in args.fail_if],
        "failures": failed,
        "versions": versions(),
        "machine": machine(),
    }
    print("\n".join(lines(result)))
    if args.json is not None:
        write_json(args.json, result)
    if args.report is not None:
        from octavo.bench.compare.page import page

        args.report.write_text(page(result), encoding="utf-8")
    for text in failed:
        print(f"failed: {text}")
    return 1 if failed else 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_sides(args: argparse.Namespace) -> list[Side]:
    """The sides that the command line names, not started."""
    if len(args.configs) + len(args.url) < 2:
        raise ConfigError("expected at least two sides: YAML files, or --url for running servers")
    split = [_side_file(given) for given in args.configs]
    files = [_with_keys(file, keys) for file, keys in split]
    names = names_of(files, args.url)
    sides: list[Side] = []
    for name, (file, keys) in zip(names, split, strict=False):
        overrides = [*args.overrides, *keys]
        if args.serve:
            sides.append(
                ServerSide(
                    name,
                    file=file,
                    overrides=overrides,
                    api_key=args.api_key,
                    vocab_size=args.vocab_size,
                )
            )
        else:
            sides.append(EngineSide(name, file, overrides))
    for name, url in zip(names[len(files) :], args.url, strict=True):
        sides.append(
            ServerSide(
                name,
                url=url,
                model=args.model,
                api_key=args.api_key,
                vocab_size=args.vocab_size,
            )
        )
    return sides


def _side_file(given: str) -> tuple[str, list[str]]:
    """`demo.yaml+scheduler.max_num_seqs=8+...`: the file and the keys set for this side."""
    file, *keys = given.split("+")
    wrong = [key for key in keys if "=" not in key]
    if wrong:
        raise ConfigError(f"'{given}': expected FILE+key=value, got '+{wrong[0]}'")
    return file, keys


def _with_keys(file: str, keys: Sequence[str]) -> str:
    """A name that tells sides of one file apart: the last part of each key."""
    parts = [key.partition("=") for key in keys]
    short = [f"{key.rpartition('.')[2]}={value[:24]}" for key, _, value in parts]
    stem = file.rpartition("/")[2].rpartition(".")[0] or file
    return "+".join([stem.replace(".", "_"), *short]).replace("/", "_") + ".yaml"
