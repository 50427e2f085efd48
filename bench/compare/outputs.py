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
"""Sides that differ by more for equal tokens compute different things."""
EXACT = 1e-6
"""What log probabilities of float32 lose on their way; all that is rounding between sides whose log
probabilities are equal."""
_NEAR = 2  # candidates of a position whose log probabilities are compared: a token and its rival
_UNEXPLAINED = ("error", "unknown")


def compare_greedy(first: Greedy, other: Greedy, dtype: str = "float32") -> dict[str, Any]:
    """Token by token. At the first difference of a prompt both sides have seen the same tokens, so
    their two log probabilities differ by what they compute: `gap`, the sum of both margins (each
    side's token over the other side's), is by how much they disagree about the two tokens.

    It is rounding when each side prefers its own token, both rank both tokens, and the gap is no
    more than a few times the largest difference of log probabilities before (`noise`), within
    bounds by dtype. Sides whose log probabilities are equal do not round differently.

    verdict: `identical`, `rounding`, `error` (more than rounding explains) or `unknown` (not
    explained: log probabilities are missing, or tokens cannot be compared)."""
    pairs = list(zip(first, other, strict=True))
    if any(_kind(a) != _kind(b) for a, b in pairs):
        why = "the sides name tokens differently"
        found: dict[str, Any] = {"verdict": "unknown", "why": why, "num_identical": 0}
        return found | {"prompts": [{"verdict": "unknown", "why": why} for _ in pairs]}
    places = [_difference(a["tokens"], b["tokens"]) for a, b in pairs]
    noise = [d for (a, b), at in zip(pairs, places, strict=True) for d in _before(a, b, at)]
    there = [d for (a, b), at in zip(pairs, places, strict=True) for d in _beside(a, b, at)]
    largest, seen = max(noise, default=0.0), noise + there
    floor, ceiling = FLOOR.get(dtype, 0.1), CEILING.get(dtype, 0.5)
    allowed = 4 * min(max(largest, floor), ceiling)
    if seen and max(seen) <= EXACT:
        allowed = EXACT
    prompts = [_prompt(a, b, at, allowed) for (a, b), at in zip(pairs, places, strict=True)]
    if max(seen, default=0.0) > ceiling:
        why = f"log probabilities of equal tokens differ by more than rounding in {dtype}"
        for prompt in prompts:
            if prompt["verdict"] == "rounding":
                prompt |= {"verdict": "error", "why": why}
    kinds = {prompt["verdict"] for prompt in prompts}
    return {
        "verdict": next((k for k in (*_UNEXPLAINED, "rounding") if k in kinds), "identical"),
        "prompts": prompts,
        "num_identical": sum(p["verdict"] == "identical" for p in prompts),
        "noise": largest,
        "noise_rms": float(np.sqrt(np.mean(np.square(noise)))) if noise else 0.0,
        "allowed": allowed,
    }


def unexplained(greedy: Mapping[str, Any]) -> int:
    """Prompts whose difference rounding does not explain, or of which that is not known."""
    return sum(prompt["verdict"] in _UNEXPLAINED for prompt in greedy["prompts"])


def _kind(output: Mapping[str, Any]) -> type | None:
    """Whether its tokens are ids or texts."""
    return type(output["tokens"][0]) if output["tokens"] else None


def _difference(first: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Where two lists first differ; an end before the other's end counts."""
    for place, (a, b) in enumerate(zip(first, other, strict=False)):
        if a != b:
            return place
    return None if len(first) == len(other) else min(len(first), len(other))


def _before(a: Mapping[str, Any], b: Mapping[str, Any], until: int | None) -> list[float]:
    """By how much log probabilities of equal tokens differ where the outputs agree."""
    tops = list(zip(a["top"], b["top"], strict=False))[:until]
    return [d for one, two in tops for d in _apart(one, two)]


def _beside(a: Mapping[str, Any], b: Mapping[str, Any], at: int | None) -> list[float]:
    """The same at the first difference, the two tokens themselves left out."""
    if at is None or at >= min(len(a["top"]), len(b["top"]), len(a["tokens"]), len(b["tokens"])):
        return []
    chosen = (a["tokens"][at], b["tokens"][at])
    return _apart([pair for pair in a["top"][at] if pair[0] not in chosen], b["top"][at])


def _apart(one: Sequence[Sequence[Any]], two: Sequence[Sequence[Any]]) -> list[float]:
    known = dict(map(tuple, two))
    shared = [abs(float(value) - known[name]) for name, value in one if name in known]
    return shared[:_NEAR]


def _value(top: Sequence[Sequence[Any]], token: Any) -> float | None:
    return next((float(value) for name, value in top if name == token), None)


def _prompt(
    a: Mapping[str, Any], b: Mapping[str, Any], at: int | None, allowed: float
) -> dict[str, Any]:
    if at is None:
        return {"verdict": "identical", "tokens": len(a["tokens"])}
    found: dict[str, Any] = {"at": at, "tokens": len(a["tokens"]), "verdict": "error"}
    if at >= min(len(a["tokens"]), len(b["tokens"])):
        return found | {"why": "one output ends before the other"}
    x, y = a["tokens"][at], b["tokens"][at]
    found |= {"first_token": x, "other_token": y}
    tops = [side["top"][at] if at < len(side["top"]) else () for side in (a, b)]
    if not all(tops):
        return found | {"verdict": "unknown", "why": "a side gives no log probabilities"}
    first, other = _margin(tops[0], x, y), _margin(tops[1], y, x)
    found |= {"first_margin": first, "other_margin": other}
    # What is greedy takes the most probable; where it did not, a mask or a bias had its say.
    if first is None or other is None:
        return found | {"why": "a side chose a token that is not among its own most probable ones"}
    if min(first, other) < -EXACT:
        return found | {"why": "a side chose a token that it holds for less probable"}
    found["gap"] = first + other
    if found["gap"] > allowed:
        return found
    if _value(tops[0], y) is None or _value(tops[1], x) is None:
        why = "a side's token is not among the most probable ones of the other"
        return found | {"verdict": "unknown", "why": why}
    return found | {"verdict": "rounding"}


def _margin(top: Sequence[Sequence[Any]], chosen: Any, rival: Any) -> float | None:
    """How much more probable (in logarithms, so in logits) the chosen token is than the rival; at
    least so much where the rival is not among the alternatives."""
    value, other = _value(top, chosen), _value(top, rival)
    if value is None:
        return None
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
