"""`--fail-if 'ttft_p99>1.05'`."""

from __future__ import annotations

import argparse
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.compare.metrics import BY_NAME
from octavo.bench.compare.outputs import unexplained
from octavo.core.errors import nearest

OPERATORS = {">": operator.gt, "<": operator.lt, ">=": operator.ge, "<=": operator.le}
OUTPUTS = ("output_errors", "output_differences")
"""Prompts whose greedy outputs differ in a way that rounding does not explain; and at all."""


@dataclass(frozen=True)
class Condition:
    """metric: a name of `METRICS` or `OUTPUTS`. part: `estimate`, `low` or `high`."""

    metric: str
    part: str
    operator: str
    limit: float

    @property
    def text(self) -> str:
        part = "" if self.part == "estimate" else f".{self.part}"
        return f"{self.metric}{part}{self.operator}{self.limit:g}"


def condition(text: str) -> Condition:
    """For argparse."""
    found = re.fullmatch(r"\s*(\w+)(?:\.(low|high))?\s*(>=|<=|>|<)\s*([-+.\w]+)\s*", text)
    try:
        limit = float(found[4]) if found else None
    except ValueError:
        limit = None
    if found is None or limit is None:
        raise argparse.ArgumentTypeError(
            f"expected METRIC>NUMBER, such as ttft_p99>1.05, got {text!r}"
        )
    names = [*BY_NAME, *OUTPUTS]
    if found[1] not in names:
        raise argparse.ArgumentTypeError(f"no metric '{found[1]}'; {nearest(found[1], names)}")
    return Condition(found[1], found[2] or "estimate", found[3], limit)


def failures(conditions: Sequence[Condition], result: Mapping[str, Any]) -> list[str]:
    """What holds, in words; a condition is asked of every side but the first. One of something that
    was not measured fails too: a gate that is not looked at must not stand open."""
    found = []
    for number, side in enumerate(result["sides"][1:], start=1):
        for asked in conditions:
            value = _value(asked, number, result)
            if value is None:
                found.append(f"{side['name']}: {asked.text} cannot be told: it was not measured")
            elif OPERATORS[asked.operator](value, asked.limit):
                found.append(f"{side['name']}: {asked.text}, it is {value:.4g}")
    return found


def _value(asked: Condition, side: int, result: Mapping[str, Any]) -> float | None:
    if asked.metric in OUTPUTS:
        check = next((c for c in result["checks"] if c["side"] == side), None)
        if check is None or check.get("greedy") is None:
            return None
        greedy = check["greedy"]
        if asked.metric == "output_errors":
            return float(unexplained(greedy))
        return float(sum(prompt["verdict"] != "identical" for prompt in greedy["prompts"]))
    for row in result["metrics"]:
        if row["side"] == side and row["metric"] == asked.metric:
            value = row[asked.part]
            return None if value is None else float(value)
    return None
