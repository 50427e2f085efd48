"""The HTML report: one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from octavo.bench.charts import Line, chart
from octavo.bench.html import document, figure, grid, legend, table_of
from octavo.bench.simulate.report import headline, slo_text, table

Result = Mapping[str, Any]
Columns = Callable[[Result], tuple[Sequence[float], Sequence[float]]]


def page(whole: Result) -> str:
    """The report of a whole simulation, as HTML."""
    results: Sequence[Result] = whole["results"]
    parts = [
        f"<p>{escape(headline(whole))}</p>",
        f'<p class="soft">Times are those of the simulated accelerator; '
        f"{escape(slo_text(results[0]))}.</p>",
        "<h2>Figures</h2>",
        table_of([r["config"] for r in results], table(whole)),
        "<h2>Latency</h2>",
        _charts(_latency_figures(), results),
        "<h2>Over time</h2>",
        _charts(_time_figures(), results),
        *_users(results),
        "<h2>Engines</h2>",
        *[_engine(result) for result in results],
    ]
    return document("Octavo simulation", parts)


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

    def over_time(title: str, what: str, name: str, percent: bool = False) -> Figure:
        shape = {"x": "seconds", "y": title, "percent": percent}
        return title, what, series(name), shape

    return [
        over_time("KV cache in use", "share of its blocks", "kv_usage", True),
        over_time("Running", "requests", "running"),
        over_time("Waiting", "requests", "waiting"),
        over_time("Prefill", "prompt tokens computed a second", "prefill_tokens_per_s"),
        over_time("Decode", "rows that decode, a second", "decode_tokens_per_s"),
    ]


def _charts(figures: Sequence[Figure], results: Sequence[Result]) -> str:
    key = legend([r["config"] for r in results])
    parts = []
    for title, what, columns, shape in figures:
        drawn = chart([Line(r["config"], i, *columns(r)) for i, r in enumerate(results)], **shape)
        parts.append(figure(title, what, key, drawn))
    return grid(parts)


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
        parts.append(table_of(names, rows))
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
