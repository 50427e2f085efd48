"""The HTML report: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from octavo.bench.charts import Line, chart
from octavo.bench.simulate.report import headline, slo_text, table

STYLE = """
:root { --bg: #fff; --fg: #1b1f24; --soft: #5b6570; --rule: #d9dee3; --head: #f3f5f7;
  --c0: #2563a8; --c1: #c4571b; --c2: #2c7a4b; --c3: #8a3fa0; --c4: #a3842a; --c5: #b3294e;
  --c6: #3b8f99; --c7: #5e5e5e; }
@media (prefers-color-scheme: dark) { :root { --bg: #15181c; --fg: #e6e9ec; --soft: #9aa4ae;
  --rule: #343a41; --head: #1e2329; --c0: #6ba6e8; --c1: #ee8f57; --c2: #67bd8b; --c3: #c58adb;
  --c4: #d9bb62; --c5: #ec7395; --c6: #72c7d1; --c7: #a8a8a8; } }
body { background: var(--bg); color: var(--fg); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1360px; margin: 0 auto; padding: 24px 20px 60px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 36px 0 8px; }
p { margin: 4px 0; } .soft, .empty, figcaption { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 14px; border-bottom: 1px solid var(--rule); text-align: right; }
th:first-child, td:first-child { text-align: left; white-space: pre; padding-left: 4px; }
thead th { background: var(--head); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(560px, 100%), 1fr));
  gap: 20px 32px; }
figure { margin: 0; } figcaption { margin-bottom: 2px; } figcaption b { color: var(--fg); }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--rule); } .tick, .axis { fill: var(--soft); font: 12px system-ui, sans-serif; }
polyline { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.key { display: inline-block; width: 14px; height: 3px; margin: 0 5px 4px 14px; }
""" + "".join(
    f".c{i} {{ stroke: var(--c{i}); }} .key.c{i} {{ background: var(--c{i}); }}\n" for i in range(8)
)

Result = Mapping[str, Any]
Columns = Callable[[Result], tuple[Sequence[float], Sequence[float]]]


def page(whole: Result) -> str:
    """The report of a whole simulation, as HTML."""
    results: Sequence[Result] = whole["results"]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<title>Octavo simulation</title>",
        f"<style>{STYLE}</style></head><body>",
        "<h1>Octavo simulation</h1>",
        f"<p>{escape(headline(whole))}</p>",
        f'<p class="soft">Times are those of the simulated accelerator; '
        f"{escape(slo_text(results[0]))}.</p>",
        "<h2>Figures</h2>",
        _table([r["config"] for r in results], table(whole)),
        "<h2>Latency</h2>",
        _charts(_latency_figures(), results),
        "<h2>Over time</h2>",
        _charts(_time_figures(), results),
        *_users(results),
        "<h2>Engines</h2>",
        *[_engine(result) for result in results],
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        f"<tr><td>{escape(title)}</td>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for title, cells in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


Figure = tuple[str, str, Columns, dict[str, Any]]


def _latency_figures() -> list[Figure]:
    def curve(name: str) -> Columns:
        def columns(result: Result) -> tuple[Sequence[float], Sequence[float]]:
            values = [value * 1e3 for value in result["curves"][name]]
            return values, [i / (len(values) - 1) for i in range(len(values))]

        return columns

    shape = {"x": "milliseconds", "y": "share of requests", "percent": True, "log": True}
    return [
        ("Time to first token", "share of requests that had it by then", curve("ttft_s"), shape),
        ("Inter-token latency", "share of gaps that were at most so long", curve("itl_s"), shape),
    ]


def _time_figures() -> list[Figure]:
    def series(name: str) -> Columns:
        return lambda result: (result["series"]["time"], result["series"][name])

    def figure(title: str, what: str, name: str, percent: bool = False) -> Figure:
        shape = {"x": "seconds", "y": title, "percent": percent}
        return title, what, series(name), shape

    return [
        figure("KV cache in use", "share of its blocks", "kv_usage", True),
        figure("Running", "requests", "running"),
        figure("Waiting", "requests", "waiting"),
        figure("Prefill", "prompt tokens computed a second", "prefill_tokens_per_s"),
        figure("Decode", "rows that decode, a second", "decode_tokens_per_s"),
    ]


def _charts(figures: Sequence[Figure], results: Sequence[Result]) -> str:
    key = "".join(
        f'<span class="key c{i % 8}"></span>{escape(r["config"])}' for i, r in enumerate(results)
    )
    parts = []
    for title, what, columns, shape in figures:
        drawn = chart([Line(r["config"], i, *columns(r)) for i, r in enumerate(results)], **shape)
        parts.append(
            f"<figure><figcaption><b>{escape(title)}</b>, {escape(what)}{key}</figcaption>"
            f"{drawn}</figure>"
        )
    return f'<div class="charts">{"".join(parts)}</div>'


def _users(results: Sequence[Result]) -> list[str]:
    """A table of users for every configuration that saw more than one."""
    parts = []
    for result in results:
        fairness = result["fairness"]
        if fairness["num_users"] < 2:
            continue
        rows = [
            (
                name,
                [
                    f"{user['requests']:,}",
                    f"{user['prompt_tokens']:,}",
                    f"{user['output_tokens']:,}",
                    f"{user['mean_ttft_s'] * 1e3:,.0f}",
                    f"{user['max_ttft_s'] * 1e3:,.0f}",
                    f"{user['output_tokens_per_s']:,.1f}",
                ],
            )
            for name, user in list(fairness["users"].items())[:20]
        ]
        names = ["requests", "prompt tokens", "output tokens", "mean first token (ms)"]
        names += ["worst first token (ms)", "output tokens/s"]
        parts.append(f"<h2>Users: {escape(result['config'])}</h2>")
        parts.append(
            f'<p class="soft">{fairness["num_users"]:,} users, those with most tokens first; '
            f"Jain's index of their speeds {fairness['jain_speed']:.3f}.</p>"
        )
        parts.append(_table(names, rows))
    return parts


def _engine(result: Result) -> str:
    engine = result["engine"]
    if engine is None:
        return ""
    plugins = {choice["kind"]: choice["name"] for choice in engine["plugins"]}
    kinds = ("scheduler_policy", "kv_cache_manager", "preemption_policy")
    chosen = ", ".join(f"{kind.replace('_', ' ')} {plugins.get(kind)}" for kind in kinds)
    text = (
        f"{engine['num_parameters'] / 1e9:,.2f} billion parameters in {engine['dtype']}, "
        f"{engine['num_blocks']:,} KV blocks of {engine['block_size']} tokens, at most "
        f"{engine['max_num_seqs']} sequences and {engine['max_num_batched_tokens']:,} tokens a "
        f"step; {chosen}. {' '.join(engine['notes'])}"
    )
    return f"<p><b>{escape(result['config'])}</b>: {escape(text)}</p>"
