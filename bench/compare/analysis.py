"""From the rounds of all sides to ratios, intervals and verdicts against the first side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.bench.compare.metrics import METRICS, Metric, values_of
from octavo.bench.compare.statistics import (
    LEAST_ROUNDS,
    adjusted_p_values,
    detectable,
    interval,
    rounds_needed,
)

Values = Sequence[Mapping[str, float]]


def analyze(
    sides: Sequence[Values],
    noise: Sequence[tuple[Mapping[str, float], Mapping[str, float]]] = (),
    *,
    alpha: float = 0.05,
    min_effect: float = 0.01,
) -> list[dict[str, Any]]:
    """One row for every metric and side but the first.

    sides: the values of every round of each side, in the same order of rounds. noise: pairs of
    rounds of the first side. min_effect: a smaller relative difference is no verdict, sure or not.
    All rows are one family: the chance that any of them is a false alarm is at most alpha.
    """
    rows = []
    for metric in METRICS:
        for number, side in enumerate(sides[1:], start=1):
            row = _row(metric, sides[0], side, noise)
            if row is not None:
                rows.append({"side": number, **row})
    tested = [row for row in rows if row["differences"] is not None]
    matrix = np.array([row["differences"] for row in tested]).reshape(len(tested), len(sides[0]))
    for row, p in zip(tested, adjusted_p_values(matrix), strict=True):
        row["p"] = float(p)
    for row in rows:
        _judge(row, len(tested), alpha, min_effect)
        del row["differences"]
    return rows


def _row(
    metric: Metric,
    first: Values,
    other: Values,
    noise: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[str, Any] | None:
    """Values and paired differences (of logarithms for a ratio); None where a side lacks it."""
    name = metric.name
    if not all(name in values for values in (*first, *other)):
        return None
    a = np.array([values[name] for values in first])
    b = np.array([values[name] for values in other])
    kind = metric.kind
    if kind == "ratio" and not (a.min() > 0 and b.min() > 0):
        kind = "difference"
    if not a.any() and not b.any():
        return None  # nothing of the kind happened
    differences = np.log(b / a) if kind == "ratio" else b - a
    differences = np.where(np.abs(differences) < 1e-12, 0.0, differences)
    effect, (low, high) = float(differences.mean()), interval(differences)
    pairs = [_change(kind, x[name], y[name]) for x, y in noise if name in x and name in y]
    known = [pair for pair in pairs if pair is not None]
    to_value = math.exp if kind == "ratio" else float
    return {
        "metric": name,
        "title": metric.title,
        "better": metric.better,
        "kind": kind,
        "unit": metric.unit,
        "scale": metric.scale,
        "first": float(a.mean()),
        "other": float(b.mean()),
        "estimate": to_value(effect),
        "low": _safe(to_value, low),
        "high": _safe(to_value, high),
        "spread": float(differences.std(ddof=1)) if len(a) > 1 else 0.0,
        "effect": effect,
        "rounds": len(a),
        "noise": float(np.abs(known).max()) if known else None,
        "p": 1.0,
        "differences": differences.tolist(),
    }


def _safe(function: Any, value: float) -> float | None:
    """None for what is not finite: JSON has no infinity."""
    if not math.isfinite(value):
        return None
    try:
        found = float(function(value))
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def _change(kind: str, x: float, y: float) -> float | None:
    if kind == "difference":
        return 0.0 if math.isclose(x, y, rel_tol=1e-12) else y - x
    return math.log(y / x) if x > 0 and y > 0 else None


def _relative(row: Mapping[str, Any]) -> float:
    """How large the difference is, as a fraction of the first side's value."""
    if row["kind"] == "ratio":
        return abs(float(row["estimate"]) - 1)
    return abs(row["effect"]) / abs(row["first"]) if row["first"] else math.inf


def _judge(row: dict[str, Any], metrics: int, alpha: float, min_effect: float) -> None:
    """Adds `verdict` (better, worse, different, negligible, same, unclear) and what it rests on."""
    needed = rounds_needed(row["effect"], row["spread"], metrics, alpha=alpha)
    visible = detectable(row["spread"], row["rounds"], metrics, alpha=alpha)
    row["more_rounds"] = None if needed is None else max(0, needed - row["rounds"])
    row["detectable"] = (
        _safe(math.expm1, visible) if row["kind"] == "ratio" else _safe(float, visible)
    )
    if row["effect"] == 0 and row["spread"] == 0:
        row["verdict"], row["more_rounds"] = "same", None
    elif row["p"] > alpha:
        row["verdict"] = "unclear"
        if _relative(row) < min_effect:
            row["more_rounds"] = None  # what is seen would not matter if it were sure
        elif row["more_rounds"] == 0:
            row["more_rounds"] = 1
    elif _relative(row) < min_effect:
        row["verdict"], row["more_rounds"] = "negligible", 0
    else:
        row["more_rounds"] = 0
        better = row["better"]
        if better is None:
            row["verdict"] = "different"
        else:
            row["verdict"] = "better" if (row["effect"] > 0) == (better == "more") else "worse"


def explain(row: Mapping[str, Any]) -> str:
    """The verdict in words."""
    verdict = row["verdict"]
    words = {
        "better": "better",
        "worse": "worse",
        "different": "different",
        "same": "the same in every round",
        "negligible": "a difference too small to matter",
    }
    if verdict in words:
        return words[verdict]
    if row["rounds"] < LEAST_ROUNDS:
        return f"no verdict from under {LEAST_ROUNDS} rounds"
    text = "no difference shown"
    more = row["more_rounds"]
    if row["detectable"] is not None:
        if row["kind"] == "ratio":
            size = f"{row['detectable']:.1%}"
        else:
            size = f"{row['detectable'] * row['scale']:.2g}"
            size += " points" if row["unit"] == "%" else ""
        text += f"; {size} would have been"
    if more is not None:
        text += f"; {more} more rounds for this one"
    return text


def values_of_rounds(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """The metrics of every round."""
    return [values_of(data) for data in rounds]
