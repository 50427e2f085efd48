"""The result of `octavo bench serve`, with vLLM's keys, and its table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from octavo.bench.load.answers import Answer, samples, totals
from octavo.core.errors import ConfigError

TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def vllm_result(
    args: argparse.Namespace,
    settings: Mapping[str, Any],
    answers: Sequence[Answer],
    seconds: float,
    model: str,
) -> dict[str, Any]:
    """Times in milliseconds, as `vllm bench serve` names and saves them."""
    found = totals(answers, seconds, settings["slo"])
    good = [a for a in answers if a.good]
    result: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "label": args.label,
        "backend": args.backend,
        "model_id": model,
        "num_prompts": len(answers),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "duration": seconds,
        "completed": found["completed"],
        "failed": found["failed"],
        "total_input_tokens": found["prompt_tokens"],
        "total_output_tokens": found["output_tokens"],
        "cached_input_tokens": found["cached_tokens"],
        "request_throughput": found["requests_per_s"],
        "request_goodput": found["goodput"] if settings["slo"] else None,
        "output_throughput": found["output_tokens_per_s"],
        "total_token_throughput": found["total_tokens_per_s"],
        "max_concurrent_requests": _most_at_once(good),
    }
    values = samples(answers)
    values["e2el"] = values.pop("e2e")
    for name in settings["metrics"]:
        result |= _figures(name, values[name], settings["percentiles"])
    for given in args.metadata or ():
        key, equals, value = given.partition("=")
        if not equals:
            raise ConfigError(f"--metadata: expected KEY=VALUE, got '{given}'")
        result[key] = value
    if args.save_detailed:
        result |= {
            "input_lens": [a.num_prompt for a in answers],
            "output_lens": [a.num_output for a in answers],
            "ttfts": [a.ttft if a.good else 0.0 for a in answers],
            "itls": [np.diff(a.times).tolist() for a in answers],
            "start_times": [a.sent for a in answers],
            "generated_texts": [a.text for a in answers],
            "errors": [a.error or "" for a in answers],
        }
    return result


def _figures(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    array = np.asarray(values if len(values) else [0.0]) * 1e3
    out = {
        f"mean_{name}_ms": float(array.mean()),
        f"median_{name}_ms": float(np.median(array)),
        f"std_{name}_ms": float(array.std()),
    }
    return out | {f"p{p:g}_{name}_ms": float(np.percentile(array, p)) for p in percentiles}


def _most_at_once(answers: Sequence[Answer]) -> int:
    """Most requests under way at one moment."""
    moments = [(a.sent, 1) for a in answers] + [(a.ended, -1) for a in answers]
    count = most = 0
    for _, change in sorted(moments):
        count += change
        most = max(most, count)
    return most


def lines(result: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """For people."""
    rows = [
        ("Successful requests", f"{result['completed']:,}"),
        ("Failed requests", f"{result['failed']:,}"),
        ("Benchmark duration (s)", f"{result['duration']:.2f}"),
        ("Total input tokens", f"{result['total_input_tokens']:,}"),
        ("  found in the prefix cache", f"{result['cached_input_tokens']:,}"),
        ("Total generated tokens", f"{result['total_output_tokens']:,}"),
        ("Request throughput (req/s)", f"{result['request_throughput']:.2f}"),
        ("Output token throughput (tok/s)", f"{result['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{result['total_token_throughput']:.2f}"),
        ("Most requests at once", f"{result['max_concurrent_requests']}"),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", f"{result['request_goodput']:.2f}"))
    out = [" Serving benchmark result ".center(56, "=")]
    out += [f"{title + ':':<42}{value:>14}" for title, value in rows]
    for name in settings["metrics"]:
        out.append(TITLES[name].center(56, "-"))
        figures = ["mean", "median", *(f"p{p:g}" for p in settings["percentiles"])]
        for figure in figures:
            label = f"{figure.capitalize()} {name.upper()} (ms):"
            out.append(f"{label:<42}{result[f'{figure}_{name}_ms']:>14.2f}")
    return [*out, "=" * 56]
