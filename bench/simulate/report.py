"""The table that `octavo simulate` prints: one column a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Result = Mapping[str, Any]


def _ms(key: str, figure: str) -> Callable[[Result], str]:
    return lambda r: f"{r[key][figure] * 1e3:,.1f}"


ROWS: list[tuple[str, Callable[[Result], str]]] = [
    ("served", lambda r: f"{r['requests']['served']:,}"),
    ("refused", lambda r: f"{r['requests']['refused']:,}"),
    ("simulated time (s)", lambda r: f"{r['duration_s']:,.1f}"),
    ("busy", lambda r: f"{r['busy_fraction']:.1%}"),
    ("requests/s", lambda r: f"{r['requests_per_s']:,.2f}"),
    ("output tokens/s", lambda r: f"{r['output_tokens_per_s']:,.0f}"),
    ("prompt and output tokens/s", lambda r: f"{r['total_tokens_per_s']:,.0f}"),
    ("time to first token (ms) mean", _ms("ttft_s", "mean")),
    ("  p50", _ms("ttft_s", "p50")),
    ("  p90", _ms("ttft_s", "p90")),
    ("  p99", _ms("ttft_s", "p99")),
    ("inter-token latency (ms) mean", _ms("itl_s", "mean")),
    ("  p50", _ms("itl_s", "p50")),
    ("  p90", _ms("itl_s", "p90")),
    ("  p99", _ms("itl_s", "p99")),
    ("arrival to end (ms) p50", _ms("e2e_s", "p50")),
    ("  p99", _ms("e2e_s", "p99")),
    ("goodput (requests/s)", lambda r: f"{r['goodput']['requests_per_s']:,.2f}"),
    ("  of all requests", lambda r: f"{r['goodput']['fraction']:.1%}"),
    ("prefix cache hit rate", lambda r: f"{r['prefix_hit_rate']:.2%}"),
    ("preemptions", lambda r: f"{r['num_preemptions']:,}"),
    ("  by swapping", lambda r: f"{r['scheduler'].get('num_swap_outs', 0):,}"),
    ("swapped tokens", lambda r: f"{r['swapped_tokens']:,}"),
    ("KV cache blocks", lambda r: f"{r['kv']['num_blocks']:,}"),
    ("  mean use", lambda r: f"{r['kv']['mean_usage']:.1%}"),
    ("  peak use", lambda r: f"{r['kv']['peak_usage']:.1%}"),
    ("most running", lambda r: f"{r['peak_running']:,}"),
    ("most waiting", lambda r: f"{r['peak_waiting']:,}"),
    ("fairness (Jain, speed)", lambda r: f"{r['fairness']['jain_speed']:.3f}"),
    ("fairness (Jain, first token)", lambda r: f"{r['fairness']['jain_ttft']:.3f}"),
    ("steps", lambda r: f"{r['num_steps']:,}"),
    ("took (s)", lambda r: f"{r['wall_s']:,.1f}"),
]


def slo_text(result: Result) -> str:
    """What goodput counts."""
    targets = result["goodput"]["slo"]
    if not targets:
        return "no target is set (--slo): goodput counts every request that is served"
    limits = ", ".join(f"{name} at most {limit:g} s" for name, limit in targets.items())
    return f"goodput counts requests with {limits}"


def table(whole: Result) -> list[tuple[str, list[str]]]:
    """Rows of (what, one cell a configuration)."""
    results = whole["results"]
    return [(title, [cell(result) for result in results]) for title, cell in ROWS]


def headline(whole: Result) -> str:
    """What was replayed, in one line."""
    parts = [str(whole["trace"])]
    if whole["format"]:
        parts.append(f"format {whole['format']}")
    if whole["limit"]:
        parts.append(f"first {whole['limit']:,} requests")
    if whole["max_output"]:
        parts.append(f"outputs cut to {whole['max_output']:,} tokens")
    if whole["concurrency"]:
        parts.append(f"{whole['concurrency']} at a time")
    elif whole["speedup"] != 1:
        parts.append(f"{whole['speedup']:g} times as fast")
    return ", ".join(parts)


def lines(whole: Result) -> list[str]:
    """For people."""
    results = whole["results"]
    names = [result["config"] for result in results]
    rows = table(whole)
    first = max(len(title) for title, _ in rows)
    widths = [max(len(name), *(len(cells[i]) for _, cells in rows)) for i, name in enumerate(names)]
    out = [headline(whole), slo_text(results[0])]
    for result in results:
        why = result["requests"]["refused_because"]
        if why:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in why.items())
            out.append(f"{result['config']} refused: {reasons}")
    for title, cells in [("", names), *rows]:
        padded = "  ".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
        out.append(f"{title:<{first}}  {padded}".rstrip())
    return out
