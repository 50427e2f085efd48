"""`octavo tune`: proposes a YAML for a workload, with the reasons.

One key after another is varied from the best so far; a change is kept when it wins by more than the
noise of the rounds. What comes out is compared with what went in, in paired rounds: it is proposed
only when that shows it to be better.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from octavo.bench.arguments import positive
from octavo.bench.compare.session import Plan, Session
from octavo.bench.compare.sides import EngineSide
from octavo.bench.result_file import write_json
from octavo.bench.slo import Slo
from octavo.bench.sweep.command import add_common_arguments, simulated
from octavo.bench.sweep.points import Point, run_point
from octavo.bench.workloads.spec import WorkloadSpec, spec_from_args
from octavo.core.config.yaml_source import parse_value
from octavo.core.errors import ConfigError
from octavo.frontend.config import load_config

LEAST_GAIN = 0.02
"""A change has to win by so much at least, whatever the noise."""


@dataclass(frozen=True)
class Tunable:
    """A key, and why it can matter."""

    key: str
    why: str


KNOBS = (
    Tunable(
        "scheduler.max_num_batched_tokens",
        "larger steps compute prompts faster; smaller ones keep the tokens of others flowing",
    ),
    Tunable(
        "scheduler.max_num_seqs", "more at once shares the reading of weights, and takes KV cache"
    ),
    Tunable("scheduler.max_chunk_tokens", "smaller chunks of one prompt leave room beside it"),
    Tunable("scheduler.policy", "short prompts first lower the mean time to the first token"),
    Tunable("kv_cache.manager", "a radix tree reuses prefixes to the token, not to the block"),
    Tunable("kv_cache.block_size", "larger blocks cost less bookkeeping, smaller ones less waste"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_common_arguments(parser)
    keys = [tunable.key for tunable in KNOBS]
    parser.add_argument(
        "--keys",
        nargs="+",
        choices=keys,
        default=keys,
        metavar="KEY",
        help=f"keys to tune: {', '.join(keys)}",
    )
    parser.add_argument("--rounds", type=positive, default=2, help="rounds per trial (2)")
    parser.add_argument(
        "--confirm-rounds",
        type=positive,
        default=8,
        help="paired rounds that confirm the result (8)",
    )
    parser.add_argument("--output", metavar="TUNED.yaml", help="write the tuned configuration")


def objective(slo: Slo) -> str:
    """The metric that is made as large as possible."""
    return "goodput" if slo else "output_tokens_per_s"


def score(point: Point, slo: Slo) -> float:
    """Of a point; less than anything for one that cannot run."""
    return -1.0 if point.error is not None else point.metrics.get(objective(slo), 0.0)


def candidates(tunable: str, facts: Mapping[str, Any], spec: WorkloadSpec) -> list[str]:
    """Values to try from where an engine stands."""
    report, config = facts["report"], facts["config"]
    if tunable in ("scheduler.max_num_batched_tokens", "scheduler.max_num_seqs"):
        now = int(report[tunable.rpartition(".")[2]])
        least = 16 if tunable.endswith("tokens") else 1
        tried = [now // 4, now // 2, now * 2, now * 4]
        return [str(value) for value in dict.fromkeys(tried) if least <= value <= 65536]
    if tunable == "scheduler.max_chunk_tokens":
        budget = int(report["max_num_batched_tokens"])
        return [str(value) for value in (budget // 4, budget // 2) if value >= 16]
    now = config.get(tunable)
    if tunable == "kv_cache.block_size":
        return [str(v) for v in (16, 32, 64) if v != now]
    if tunable == "kv_cache.manager":
        shared = spec.kind in ("shared-prefix", "multi-turn", "trace")
        return [v for v in ("paged", "radix") if v != now] if shared else []
    return [v for v in ("fcfs", "sjf") if v != now]


@dataclass
class Step:
    """A key that was varied: what was tried, and what came of it."""

    key: str
    before: Any
    tried: list[tuple[str, float | None]]
    chosen: str | None
    gain: float
    why: str


def search(
    base: Point,
    keys: Sequence[str],
    spec: WorkloadSpec,
    slo: Slo,
    run: Callable[[dict[str, str]], Point],
    *,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Point, list[Step]]:
    """From `base`, key by key. run: from keys to a point."""
    best, steps = base, []
    for tunable in KNOBS:
        if tunable.key not in keys:
            continue
        before = best.facts["config"].get(tunable.key)
        if tunable.key.rpartition(".")[2] in best.facts["report"]:
            before = best.facts["report"][tunable.key.rpartition(".")[2]]
        winner, tried = best, []
        for value in candidates(tunable.key, best.facts, spec):
            point = run({**best.keys, tunable.key: value})
            tried.append((value, None if point.error else score(point, slo)))
            tell(f"  {tunable.key}={value}: {point.error or _figure(point, slo)}")
            if score(point, slo) > score(winner, slo):
                winner = point
        margin = max(LEAST_GAIN, 2 * best.spread, 2 * winner.spread)
        gain = score(winner, slo) / max(score(best, slo), 1e-12) - 1
        chosen = winner.keys[tunable.key] if winner is not best and gain > margin else None
        steps.append(Step(tunable.key, before, tried, chosen, gain if chosen else 0.0, tunable.why))
        if chosen is not None:
            best = winner
    return best, steps


def _figure(point: Point, slo: Slo) -> str:
    return f"{objective(slo).replace('_', ' ')} {score(point, slo):,.2f}"


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 0 also when nothing better was found."""
    spec = spec_from_args(args)
    overrides = [*args.overrides, *simulated(args)]
    load_config(args.config, overrides=overrides)

    def run(keys: Mapping[str, str]) -> Point:
        return run_point(args.config, overrides, keys, spec, rounds=args.rounds, slo=args.slo)

    _tell(spec.headline())
    base = run({})
    if base.error is not None:
        raise ConfigError(f"{args.config} cannot run: {base.error}")
    _tell(f"as it is: {_figure(base, args.slo)}")
    best, steps = search(base, args.keys, spec, args.slo, run, tell=_tell)
    row = _confirm(args, overrides, best, spec) if best is not base else None
    confirmed = row is not None and row["verdict"] == "better"
    text = proposal(Path(args.config), args.overrides, best if confirmed else base, steps)
    print("\n".join(lines(base, best, steps, row, args.slo)))
    if args.output is not None and confirmed:
        Path(args.output).write_text(text, encoding="utf-8")
        print(f"written to {args.output}")
    elif confirmed:
        print(text, end="")
    if args.json is not None:
        result = {
            "benchmark": "tune",
            "headline": spec.headline(),
            "base": base.as_dict(),
            "best": best.as_dict(),
            "steps": [vars(step) for step in steps],
            "confirmed": confirmed,
            "comparison": row,
        }
        write_json(args.json, result)
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _confirm(
    args: argparse.Namespace, overrides: Sequence[str], best: Point, spec: WorkloadSpec
) -> dict[str, Any] | None:
    """The objective's row of a paired comparison on other requests than those of the search."""
    sides = [
        EngineSide("as it is", args.config, overrides),
        EngineSide("proposed", args.config, [*overrides, *_settings(best.keys)]),
    ]
    plan = Plan(
        rounds=args.confirm_rounds, noise_rounds=0, slo=args.slo, check_prompts=0, time_limit_s=600
    )
    session = Session(sides, replace(spec, seed=spec.seed + 1), plan, tell=_tell)
    try:
        session.start()
        rows = session.run()["metrics"]
    finally:
        for side in sides:
            side.close()
    return next((row for row in rows if row["metric"] == objective(args.slo)), None)


def _settings(keys: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def proposal(file: Path, overrides: Sequence[str], best: Point, steps: Sequence[Step]) -> str:
    """The YAML of `file` with the keys that were found, and why, as comments above it."""
    data = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    settings = [text.partition("=")[::2] for text in overrides]
    for key, value in [*settings, *best.keys.items()]:
        *path, last = key.split(".")
        section = data
        for name in path:
            inner = section.get(name)
            section[name] = inner if isinstance(inner, dict) else {}
            section = section[name]
        section[last] = parse_value(value, key)
    reasons = [
        f"# {s.key}: {s.chosen}, was {s.before} ({s.gain:+.1%}): {s.why}"
        for s in steps
        if s.chosen is not None and s.key in best.keys
    ]
    head = [f"# {file.name}, tuned by `octavo tune`", *reasons]
    return "\n".join(head) + "\n" + yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def lines(
    base: Point, best: Point, steps: Sequence[Step], row: Mapping[str, Any] | None, slo: Slo
) -> list[str]:
    """For people: every key, what was tried, and the verdict of the paired comparison."""
    out = [f"{objective(slo).replace('_', ' ')}: {score(base, slo):,.2f} as it is"]
    for step in steps:
        tried = ", ".join(
            f"{v} {'cannot run' if s is None else format(s, ',.2f')}" for v, s in step.tried
        )
        if not step.tried:
            text = "nothing to try for this workload"
        elif step.chosen is None:
            text = f"stays {step.before} (tried {tried})"
        else:
            text = f"{step.before} -> {step.chosen}, {step.gain:+.1%} (tried {tried}): {step.why}"
        out.append(f"  {step.key}: {text}")
    if best is base:
        out.append("nothing that was tried is better than what there is")
    elif row is None or row["verdict"] != "better":
        out.append("the paired comparison does not confirm the gain: nothing is proposed")
    else:
        low, high = (f"{row[end]:.3f}" if row[end] is not None else "?" for end in ("low", "high"))
        out.append(
            f"confirmed in {row['rounds']} paired rounds: {row['estimate']:.3f} times as much "
            f"[{low}, {high}]"
        )
    return out
