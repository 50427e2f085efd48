"""What is compared: names, titles, and whether more is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.bench.load.answers import distribution


@dataclass(frozen=True)
class Metric:
    """better: `more` or `less`; None: neither. kind: compared as a `ratio`, or (counts and shares,
    which may be 0) as a `difference`. unit: of a value. scale: from what is stored to the unit."""

    name: str
    title: str
    better: Literal["more", "less"] | None
    kind: Literal["ratio", "difference"] = "ratio"
    unit: str = ""
    scale: float = 1.0


def _times(name: str, title: str) -> list[Metric]:
    return [
        Metric(f"{name}_{figure}", f"{title}, {figure}", "less", unit="ms", scale=1e3)
        for figure in ("mean", "p50", "p95", "p99")
    ]


PHASES = ("schedule", "prepare", "forward", "sample", "commit")
METRICS: tuple[Metric, ...] = (
    Metric("output_tokens_per_s", "output tokens/s", "more"),
    Metric("total_tokens_per_s", "prompt and output tokens/s", "more"),
    *_times("ttft", "time to first token"),
    *_times("itl", "inter-token latency"),
    *_times("e2e", "end to end"),
    Metric("goodput", "goodput, requests/s", "more"),
    Metric("peak_memory", "peak memory", "less", unit="MiB", scale=2.0**-20),
    Metric("device_memory", "peak device memory", "less", unit="MiB", scale=2.0**-20),
    Metric("kv_mean", "KV cache in use, mean", None, "difference", "%", 100),
    Metric("kv_peak", "KV cache in use, peak", None, "difference", "%", 100),
    Metric("preemptions", "preemptions a round", "less", "difference"),
    Metric("prefix_hit_rate", "prefix cache hit rate", "more", "difference", "%", 100),
    Metric("failed", "failed requests a round", "less", "difference"),
    *[Metric(f"step_{n}", f"a step's {n}, mean", "less", unit="ms") for n in PHASES],
)
_PLAIN = (
    "output_tokens_per_s",
    "total_tokens_per_s",
    "failed",
    "peak_memory",
    "device_memory",
    "kv_mean",
    "kv_peak",
    "preemptions",
    "prefix_hit_rate",
)
BY_NAME = {metric.name: metric for metric in METRICS}


def values_of(data: Mapping[str, Any]) -> dict[str, float]:
    """A round's value of every metric that it has."""
    found: dict[str, float] = {}
    for name in _PLAIN:
        if data.get(name) is not None:
            found[name] = float(data[name])
    if data.get("slo"):
        found["goodput"] = float(data["goodput"])
    for name in ("ttft", "itl", "e2e"):
        values = data["samples"][name]
        if values:
            figures = distribution(values)
            found |= {f"{name}_{f}": figures[f] for f in ("mean", "p50", "p95", "p99")}
    for name, phase in (data.get("phases") or {}).items():
        found[f"step_{name}"] = float(phase["mean_ms"])
    return found
