"""`octavo sweep`: the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape

from octavo.bench.arguments import positive, slo, writable
from octavo.bench.charts import Point as Dot
from octavo.bench.charts import scatter
from octavo.bench.environment import machine, versions
from octavo.bench.html import document, figure, table_of
from octavo.bench.html import grid as side_by_side
from octavo.bench.result_file import write_json
from octavo.bench.slo import Slo
from octavo.bench.sweep.points import Point, best, grid, mark_front, run_point, variations
from octavo.bench.workloads.spec import WorkloadSpec, add_workload_arguments, spec_from_args
from octavo.core.errors import ConfigError
from octavo.frontend.config import load_config

COLUMNS = (
    ("output tok/s", "output_tokens_per_s", 1.0, "{:,.1f}"),
    ("ttft p50 ms", "ttft_p50", 1e3, "{:,.1f}"),
    ("ttft p99 ms", "ttft_p99", 1e3, "{:,.1f}"),
    ("itl p99 ms", "itl_p99", 1e3, "{:,.1f}"),
    ("e2e p99 ms", "e2e_p99", 1e3, "{:,.0f}"),
    ("goodput", "goodput", 1.0, "{:,.2f}"),
    ("KV peak", "kv_peak", 100.0, "{:.0f}%"),
    ("preempted", "preemptions", 1.0, "{:.1f}"),
    ("memory MiB", "peak_memory", 2.0**-20, "{:,.0f}"),
)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """What `sweep` and `tune` share."""
    parser.add_argument("config", metavar="CONFIG.yaml", help="base configuration")
    add = parser.add_argument
    add(
        "--set",
        metavar="KEY=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="override a key for every point; repeatable",
    )
    add(
        "--simulate",
        metavar="WHAT",
        help="on a simulated executor: a device (h100, l40s, ...), "
        "or the JSON of `octavo bench throughput` to fit to",
    )
    add_workload_arguments(parser)
    add(
        "--slo",
        type=slo,
        default=Slo(),
        metavar="ttft=S,itl=S,e2e=S",
        help="latency targets, in seconds or as 50ms",
    )
    add("--json", metavar="OUT.json", type=writable, help="write all results as JSON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    add_common_arguments(parser)
    parser.add_argument(
        "--vary",
        metavar="KEY=A,B,...",
        action="append",
        required=True,
        help="values to try for a key; several --vary run every combination",
    )
    parser.add_argument("--rounds", type=positive, default=2, help="rounds per point (2)")
    parser.add_argument(
        "--max-points", type=positive, default=64, help="maximum number of points (64)"
    )
    parser.add_argument(
        "--report", metavar="OUT.html", type=writable, help="write an HTML report with plots"
    )


def simulated(args: argparse.Namespace) -> list[str]:
    """The settings that `--simulate` stands for. Raises `ConfigError`."""
    if args.simulate is None:
        return []
    config = load_config(args.config, overrides=args.overrides)
    if config.executor.kind.name == "simulated":
        raise ConfigError("--simulate: the configuration names a simulated executor already")
    key = "fitted" if args.simulate.endswith(".json") else "accelerator"
    return [f"executor.kind={json.dumps({'name': 'simulated', key: args.simulate})}"]


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status: 1 when nothing could run."""
    vary = variations(args.vary)
    wanted = grid(vary)
    if len(wanted) > args.max_points:
        raise ConfigError(f"{len(wanted)} combinations exceed --max-points {args.max_points}")
    spec = spec_from_args(args)
    overrides = [*args.overrides, *simulated(args)]
    load_config(args.config, overrides=overrides)
    points = run_points(
        wanted,
        lambda keys: run_point(
            args.config, overrides, keys, spec, rounds=args.rounds, slo=args.slo
        ),
    )
    mark_front(points)
    chosen, why = best(points, args.slo)
    result = {
        "benchmark": "sweep",
        "config": args.config,
        "simulate": args.simulate,
        "headline": spec.headline(),
        "workload": spec.as_dict(),
        "rounds": args.rounds,
        "slo": {k: v for k, v in vars(args.slo).items() if v is not None},
        "points": [point.as_dict() for point in points],
        "best": None if chosen is None else chosen.keys,
        "why": why,
        "versions": versions(),
        "machine": machine(),
    }
    print("\n".join(lines(points, spec, chosen, why)))
    if args.json is not None:
        write_json(args.json, result)
    if args.report is not None:
        args.report.write_text(page(points, spec, chosen, why, args.slo), encoding="utf-8")
    return 0 if chosen is not None else 1


def run_points(
    wanted: Sequence[Mapping[str, str]], run: Callable[[Mapping[str, str]], Point]
) -> list[Point]:
    """One after another, with a bar on a terminal."""
    from tqdm import tqdm

    found = []
    quiet = None if sys.stderr.isatty() else True
    with tqdm(total=len(wanted), unit="point", disable=quiet, dynamic_ncols=True) as bar:
        for keys in wanted:
            bar.set_description(Point(dict(keys)).name)
            found.append(run(keys))
            bar.update(1)
    return found


def rows_of(points: Sequence[Point]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Heads and rows of the table; a column that no point has is left out."""
    shown = [c for c in COLUMNS if any(c[1] in p.metrics for p in points)]
    rows = []
    for point in points:
        if point.error is not None:
            rows.append((point.name, [f"cannot run: {point.error}"]))
            continue
        cells = []
        for _, name, scale, form in shown:
            value = point.metrics.get(name)
            cells.append("" if value is None else form.format(value * scale))
        rows.append((point.name + (" *" if point.front else ""), cells))
    return [title for title, *_ in shown], rows


def lines(points: Sequence[Point], spec: WorkloadSpec, chosen: Point | None, why: str) -> list[str]:
    """For people."""
    heads, rows = rows_of(points)
    first = max(len(name) for name, _ in rows)
    whole = [cells for _, cells in rows if len(cells) == len(heads)]
    widths = [
        max(len(h), *(len(c[i]) for c in whole)) if whole else len(h) for i, h in enumerate(heads)
    ]
    out = [
        spec.headline(),
        f"  {'':<{first}}  "
        + "  ".join(head.rjust(width) for head, width in zip(heads, widths, strict=True)),
    ]
    for name, cells in rows:
        if len(cells) == len(heads):
            cells = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
        out.append(f"  {name:<{first}}  {'  '.join(cells)}")
    out.append("* on the Pareto front of output tokens/s, ttft p99 and itl p99")
    if chosen is not None:
        out.append(f"best: {chosen.name} ({why})")
    else:
        out.append(why)
    return out


def page(
    points: Sequence[Point], spec: WorkloadSpec, chosen: Point | None, why: str, target: Slo
) -> str:
    """The report, as HTML."""
    heads, rows = rows_of(points)
    rows = [(n, [*cells, *[""] * (len(heads) - len(cells))]) for n, cells in rows]
    usable = [p for p in points if p.error is None]
    figures = []
    for name, title in (("itl_p99", "inter-token latency"), ("ttft_p99", "time to first token")):
        front = _front(usable, name)
        dots = [Dot(p.name, p.metrics.get(name, 0.0) * 1e3, _speed(p), p in front) for p in usable]
        drawn = scatter(dots, x=f"{title}, p99 (ms)", y="output tokens/s")
        what = f"against {title} at p99, with the front"
        figures.append(figure("Output tokens/s", what, "", drawn))
    limits = ", ".join(f"{k} {v:g} s" for k, v in vars(target).items() if v is not None)
    summary = f"Best: {chosen.name} ({why})." if chosen is not None else why
    return document(
        "Octavo sweep",
        [
            f"<p>{escape(spec.headline())}{escape('; targets: ' + limits if limits else '')}</p>",
            f"<p><b>{escape(summary)}</b></p>",
            "<h2>Trade-offs</h2>",
            side_by_side(figures),
            "<h2>Points</h2>",
            table_of(heads, rows),
            '<p class="soft">* on the Pareto front of output tokens/s, time to first token p99 and '
            "inter-token latency p99</p>",
        ],
    )


def _speed(point: Point) -> float:
    return point.metrics["output_tokens_per_s"]


def _front(points: Sequence[Point], name: str) -> list[Point]:
    """Those with less latency than every faster one."""
    found: list[Point] = []
    least = float("inf")
    for point in sorted(points, key=lambda p: (-_speed(p), p.metrics.get(name, 0.0))):
        if point.metrics.get(name, 0.0) < least:
            least = point.metrics.get(name, 0.0)
            found.append(point)
    return found
