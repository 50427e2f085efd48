"""The HTML report of a comparison: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from octavo.bench.charts import Estimate, Line, chart, intervals, stacks
from octavo.bench.compare.analysis import explain
from octavo.bench.compare.metrics import PHASES
from octavo.bench.compare.table import (
    check_lines,
    estimate_text,
    noise_text,
    prompt_text,
    short,
    value_text,
)
from octavo.bench.html import document, figure, grid, legend, raw_table, table_of

Result = Mapping[str, Any]


def page(result: Result) -> str:
    """The report, as HTML."""
    names = [side["name"] for side in result["sides"]]
    parts = [
        f"<p>{escape(' against '.join(names))}</p>",
        f"<p>{escape(result['headline'])}</p>",
        f'<p class="soft">{escape(_method(result, names[0]))}</p>',
        *[f'<p class="note">{escape(note)}</p>' for note in result["notes"]],
        *[f'<p class="note worse">failed: {escape(text)}</p>' for text in result["failures"]],
        _summary(result, names),
        "<h2>What differs</h2>",
        _differences(result, names),
        "<h2>Figures</h2>",
        *_verdicts(result, names),
        "<h2>Latency</h2>",
        _latency(result, names),
        "<h2>Over time</h2>",
        _over_time(result, names),
        *_phases(result, names),
        *_outputs(result, names),
        "<h2>Rounds</h2>",
        _rounds(result, names),
        "<h2>Machine</h2>",
        f'<p class="soft">{escape(_machine(result))}</p>',
    ]
    return document("Octavo comparison", parts)


def _method(result: Result, first: str) -> str:
    return (
        f"{result['rounds']} rounds of every side in turns on the same requests, "
        f"{result['noise_rounds']} A/A rounds of {first} for the noise. Ratios are geometric means "
        "over paired rounds, with 95% bootstrap intervals. A verdict stands when the exact "
        "sign-flip test, corrected for the number of metrics, is below 5%, and the difference is "
        "at least "
        f"{result['min_effect']:.1%}."
    )


def _summary(result: Result, names: Sequence[str]) -> str:
    out = []
    for number, name in enumerate(names[1:], start=1):
        rows = [row for row in result["metrics"] if row["side"] == number]
        parts = []
        for verdict in ("better", "worse"):
            titles = [row["title"] for row in rows if row["verdict"] == verdict]
            if titles:
                parts.append(
                    f'<span class="{verdict}">{verdict}</span>: {escape("; ".join(titles))}'
                )
        text = ". ".join(parts) or "no difference shown in any metric"
        out.append(f"<p><b>{escape(name)}</b>: {text}.</p>")
    return "".join(out)


def _differences(result: Result, names: Sequence[str]) -> str:
    if not result["differences"]:
        return "<p>Nothing: the sides have one configuration.</p>"
    rows = [(key, [short(value) for value in values]) for key, values in result["differences"]]
    return table_of(names, rows, "left")


def _verdicts(result: Result, names: Sequence[str]) -> list[str]:
    out = []
    for number, name in enumerate(names[1:], start=1):
        rows = [row for row in result["metrics"] if row["side"] == number]
        heads = [names[0], name, "ratio or difference", "95% interval", "A/A noise", "p", "verdict"]
        cells = []
        for row in rows:
            estimate, ends = estimate_text(row)
            kind = row["verdict"] if row["verdict"] in ("better", "worse") else ""
            plain = [value_text(row["first"], row), value_text(row["other"], row)]
            plain += [estimate, ends, noise_text(row), f"{row['p']:.3f}"]
            verdict = f'<span class="{kind}">{escape(explain(row))}</span>'
            cells.append((row["title"], [*map(escape, plain), verdict]))
        out.append(raw_table(heads, cells, "verdicts"))
        ratios = [row for row in rows if row["kind"] == "ratio"]
        drawn = intervals(
            [
                Estimate(r["title"], r["estimate"], r["low"], r["high"], r["verdict"])
                for r in ratios
            ],
            result["min_effect"],
        )
        out.append(grid([figure(f"{name} against {names[0]}", "ratio of every metric", "", drawn)]))
    return out


def _latency(result: Result, names: Sequence[str]) -> str:
    figures = []
    for key, title, what in (
        ("ttft", "Time to first token", "share of requests that had it by then"),
        ("itl", "Inter-token latency", "share of gaps that were at most so long"),
        ("e2e", "End to end", "share of requests that had ended by then"),
    ):
        drawn = []
        for number, rounds in enumerate(result["data"]):
            values = np.concatenate([data["samples"][key] for data in rounds] or [[]])
            if len(values):
                points = np.percentile(values, np.linspace(0, 100, 101)) * 1e3
                shares = np.linspace(0, 1, 101)
                drawn.append(Line(names[number], number, points.tolist(), shares.tolist()))
        shape = chart(drawn, x="milliseconds", y=title, percent=True, log=True)
        figures.append(figure(title, what, legend(names), shape))
    return grid(figures)


def _over_time(result: Result, names: Sequence[str]) -> str:
    """Every side's median round by its duration."""
    typical = [_typical(rounds) for rounds in result["data"]]
    wanted: list[tuple[str, str, str, Callable[[Result], Any], bool]] = [
        ("Throughput", "output tokens a second", "throughput", lambda d: d["throughput"], False),
        ("KV cache in use", "share of its blocks", "kv_usage", _series, True),
        ("Running", "requests", "running", _series, False),
        ("Waiting", "requests", "waiting", _series, False),
    ]
    figures = []
    for title, what, name, get, percent in wanted:
        drawn = []
        for number, data in enumerate(typical):
            series = get(data)
            column = "output_tokens_per_s" if name == "throughput" else name
            if series and column in series:
                drawn.append(Line(names[number], number, series["time"], series[column]))
        if drawn:
            shape = chart(drawn, x="seconds of a round", y=title, percent=percent)
            figures.append(figure(title, what, legend(names), shape))
    return grid(figures)


def _series(data: Result) -> Any:
    return data.get("series")


def _typical(rounds: Sequence[Result]) -> Result:
    order = sorted(rounds, key=lambda data: float(data["seconds"]))
    return order[len(order) // 2]


def _phases(result: Result, names: Sequence[str]) -> list[str]:
    known = [
        (name, [np.mean([data["phases"][p]["mean_ms"] for data in rounds]) for p in PHASES])
        for name, rounds in zip(names, result["data"], strict=True)
        if all(data.get("phases") for data in rounds)
    ]
    if not known:
        return []
    drawn = stacks(
        [name for name, _ in known],
        PHASES,
        [[float(value) for value in row] for _, row in known],
        "milliseconds of a step, mean",
    )
    rows = [
        (phase, [f"{row[place]:.3f}" for _, row in known]) for place, phase in enumerate(PHASES)
    ]
    return [
        "<h2>Phases of a step</h2>",
        grid([figure("Phases", "where the time of a step goes", legend(PHASES), drawn)]),
        table_of([f"{name} (ms)" for name, _ in known], rows),
    ]


def _outputs(result: Result, names: Sequence[str]) -> list[str]:
    if not result["checks"]:
        return []
    out = ["<h2>Outputs</h2>"]
    out += [f"<p>{escape(line)}</p>" for line in check_lines(result) if not line.startswith(" ")]
    for check in result["checks"]:
        greedy = check["greedy"]
        differing = [
            (f"prompt {number}", [prompt_text(prompt)])
            for number, prompt in enumerate(greedy["prompts"] if greedy else ())
            if prompt["verdict"] != "identical"
        ]
        if differing:
            out.append(table_of([f"{names[check['side']]}: first difference"], differing, "left"))
    return out


def _rounds(result: Result, names: Sequence[str]) -> str:
    heads = [f"{name}: {what}" for name in names for what in ("s", "output tokens/s")]
    rows = []
    for number in range(result["rounds"]):
        cells = []
        for rounds in result["data"]:
            data = rounds[number]
            cells += [f"{data['seconds']:.2f}", f"{data['output_tokens_per_s']:,.1f}"]
        rows.append((f"{number + 1}", cells))
    return table_of(heads, rows)


def _machine(result: Result) -> str:
    machine = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; {packages}"
