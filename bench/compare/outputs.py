"""Whether sides compute the same: greedy outputs token by token, and sampled ones by their
distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.bench.compare.statistics import shown_distance, two_samples_differ

Greedy = Sequence[Mapping[str, Any]]

FLOOR = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.02}
"""Differences of log probabilities that rounding alone is known to make, by dtype."""
CEILING = {"float32": 0.02, "bfloat16": 0.5, "float16": 0.1}
"""Sides that differ by more at positions where they agree compute different things."""


def compare_greedy(first: Greedy, other: Greedy, dtype: str = "float32") -> dict[str, Any]:
    """Token by token. At the first difference of a prompt both sides have seen the same tokens, so
    their two log probabilities differ by what they compute: `gap`, the sum of both margins (each
    side's token over the other side's). It is rounding when it is no more than a few times the
    largest difference at positions where the sides agree, which is measured, within bounds by
    dtype.

    verdict: `identical`, `rounding`, `error` (more than rounding explains) or `unknown` (no log
    probabilities, or tokens that cannot be compared)."""
    if any(_kind(a) != _kind(b) for a, b in zip(first, other, strict=True)):
        return {"verdict": "unknown", "why": "the sides name tokens differently", "prompts": []}
    noise = [
        abs(x - y)
        for a, b in zip(first, other, strict=True)
        for x, y in _agreeing(a, b, _difference(a["tokens"], b["tokens"]))
    ]
    largest = max(noise, default=0.0)
    floor, ceiling = FLOOR.get(dtype, 0.1), CEILING.get(dtype, 0.5)
    allowed = 4 * min(max(largest, floor), ceiling)
    prompts = [_prompt(a, b, allowed) for a, b in zip(first, other, strict=True)]
    kinds = {prompt["verdict"] for prompt in prompts}
    verdict = next((k for k in ("error", "unknown", "rounding") if k in kinds), "identical")
    if largest > ceiling and verdict != "identical":
        verdict = "error"
    return {
        "verdict": verdict,
        "prompts": prompts,
        "num_identical": sum(p["verdict"] == "identical" for p in prompts),
        "noise": largest,
        "noise_rms": float(np.sqrt(np.mean(np.square(noise)))) if noise else 0.0,
        "allowed": allowed,
    }


def _kind(output: Mapping[str, Any]) -> type | None:
    """Whether its tokens are ids or texts."""
    return type(output["tokens"][0]) if output["tokens"] else None


def _difference(first: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Where two lists first differ; an end before the other's end counts."""
    for place, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return place
    return None if len(first) == len(other) else min(len(first), len(other))


def _agreeing(
    a: Mapping[str, Any], b: Mapping[str, Any], until: int | None
) -> list[tuple[float, float]]:
    """Both log probabilities of the tokens before the first difference."""
    found = []
    for token, one, two in list(zip(a["tokens"], a["top"], b["top"], strict=False))[:until]:
        x, y = _value(one, token), _value(two, token)
        if x is not None and y is not None:
            found.append((x, y))
    return found


def _value(top: Sequence[Sequence[Any]], token: Any) -> float | None:
    return next((float(value) for name, value in top if name == token), None)


def _prompt(a: Mapping[str, Any], b: Mapping[str, Any], allowed: float) -> dict[str, Any]:
    at = _difference(a["tokens"], b["tokens"])
    if at is None:
        return {"verdict": "identical", "tokens": len(a["tokens"])}
    found: dict[str, Any] = {"at": at, "tokens": len(a["tokens"]), "verdict": "unknown"}
    if at >= min(len(a["tokens"]), len(b["tokens"])):
        return found | {"verdict": "error", "why": "one output ends before the other"}
    x, y = a["tokens"][at], b["tokens"][at]
    found |= {"first_token": x, "other_token": y}
    if at >= min(len(a["top"]), len(b["top"])):
        return found
    first, other = _margin(a["top"][at], x, y), _margin(b["top"][at], y, x)
    found |= {"first_margin": first, "other_margin": other}
    if first is None or other is None:
        return found
    gap = first + other
    return found | {"gap": gap, "verdict": "rounding" if gap <= allowed else "error"}


def _margin(top: Sequence[Sequence[Any]], chosen: Any, rival: Any) -> float | None:
    """How much more probable (in logarithms, so in logits) the chosen token is than the rival; at
    least so much where the rival is not among the alternatives."""
    value = _value(top, chosen)
    if value is None or not top:
        return None
    other = _value(top, rival)
    return value - (float(top[-1][1]) if other is None else other)


def compare_samples(
    first: Sequence[Mapping[str, int]], other: Sequence[Mapping[str, int]], seed: int = 0
) -> dict[str, Any]:
    """Whether draws of both sides come from one distribution: `p`, and the largest total variation
    distance over the prompts. shown_distance: the smallest that would have been shown. verdict:
    `different` (at 1%), `same`, or `too few` draws to show any difference."""
    rows: tuple[list[Any], list[Any]] = ([], [])
    width = max(len({*a, *b}) for a, b in zip(first, other, strict=True))
    distances = []
    for a, b in zip(first, other, strict=True):
        names = sorted({*a, *b})
        pair = [np.array([counts.get(name, 0) for name in names]) for counts in (a, b)]
        shares = [counts / max(1, counts.sum()) for counts in pair]
        distances.append(float(np.abs(shares[0] - shares[1]).sum() / 2))
        for row, counts in zip(rows, pair, strict=True):
            row.append(np.pad(counts, (0, width - len(counts))))
    one, two = np.array(rows[0]), np.array(rows[1])
    p, shown = two_samples_differ(one, two, seed), shown_distance(one, two)
    unseen = "too few" if shown is None else "same"
    return {
        "p": p,
        "distance": max(distances),
        "shown_distance": shown,
        "draws": int(min(one.sum(axis=1).min(), two.sum(axis=1).min())),
        "verdict": "different" if p < 0.01 else unseen,
    }
