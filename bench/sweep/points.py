"""One configuration after another: runs, the Pareto front, the best under an SLO."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from octavo.bench.compare.analysis import values_of_rounds
from octavo.bench.compare.sides import EngineSide, SideError
from octavo.bench.slo import Slo
from octavo.bench.workloads.spec import WorkloadSpec
from octavo.core.config.yaml_source import parse_value
from octavo.core.errors import ConfigError

OBJECTIVES = (("output_tokens_per_s", True), ("ttft_p99", False), ("itl_p99", False))
"""What the front is about, and whether more is better."""


@dataclass
class Point:
    """keys: what is set, dotted key to YAML text. metrics: means over the rounds. spread: of the
    output tokens a second, relative. error: why it could not run."""

    keys: dict[str, str]
    metrics: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    front: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{k.rpartition('.')[2]}={v}" for k, v in self.keys.items()) or "as it is"

    def meets(self, slo: Slo) -> bool:
        """Whether 99% of its requests keep every target."""
        pairs = (("ttft_p99", slo.ttft), ("itl_p99", slo.itl), ("e2e_p99", slo.e2e))
        return self.error is None and all(
            limit is None or self.metrics.get(name, 0.0) <= limit for name, limit in pairs
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "keys": self.keys,
            "metrics": self.metrics,
            "spread": self.spread,
            "error": self.error,
            "front": self.front,
        }


def variations(given: Sequence[str]) -> dict[str, list[str]]:
    """`--vary KEY=A,B,C` to the values of each key. A comma inside brackets belongs to a value.
    Raises `ConfigError`."""
    found: dict[str, list[str]] = {}
    for text in given:
        key, equals, values = text.partition("=")
        split = _split(values)
        if not equals or not key or not all(split):
            raise ConfigError(f"--vary: expected KEY=VALUE,VALUE,..., got '{text}'")
        if key in found:
            raise ConfigError(f"--vary: {key} is given twice")
        for value in split:
            parse_value(value, "--vary")
        found[key] = split
    return found


def _split(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def grid(vary: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Every combination, the last key varying fastest."""
    return [dict(zip(vary, row, strict=True)) for row in itertools.product(*vary.values())]


def run_point(
    file: str,
    overrides: Sequence[str],
    keys: Mapping[str, str],
    spec: WorkloadSpec,
    *,
    rounds: int,
    slo: Slo,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> Point:
    """Start an engine, warm it up, run the rounds, end it. What goes wrong is the point's error."""
    point = Point(dict(keys))
    settings = [*overrides, *(f"{key}={value}" for key, value in keys.items())]
    side = EngineSide(point.name, file, settings)
    try:
        side.start()
        vocab_size = side.facts["vocab_size"]
        if not side.facts["simulated"]:
            side.round(spec.calls(vocab_size, 0, 2), spec.concurrency, slo, on_tokens)
        data = [
            side.round(spec.calls(vocab_size, number), spec.concurrency, slo, on_tokens)
            for number in range(rounds)
        ]
        failed = [d for d in data if not d["completed"]]
        if failed:
            raise SideError("; ".join(failed[0]["errors"]) or "no request was answered")
        values = values_of_rounds(data)
        names = set.intersection(*(set(v) for v in values))
        point.metrics = {n: float(np.mean([v[n] for v in values])) for n in sorted(names)}
        speeds = [v["output_tokens_per_s"] for v in values]
        point.spread = float(np.std(speeds) / np.mean(speeds))
        point.facts = side.facts
    except SideError as error:
        point.error = str(error).removeprefix(f"{point.name}: ")
    finally:
        side.close()
    return point


def mark_front(points: Sequence[Point]) -> None:
    """Sets `front` of every point that no other one beats in one objective without losing in
    another."""
    usable = [p for p in points if p.error is None]
    scores = [
        tuple(p.metrics.get(n, 0.0) * (1 if more else -1) for n, more in OBJECTIVES) for p in usable
    ]
    for point, mine in zip(usable, scores, strict=True):
        point.front = not any(
            other != mine and all(a >= b for a, b in zip(other, mine, strict=True))
            for other in scores
        )


def best(points: Sequence[Point], slo: Slo) -> tuple[Point | None, str]:
    """The point to take, and why: the most output tokens a second among those whose p99 keep the
    SLO; where none does, the most requests that keep it."""
    usable = [p for p in points if p.error is None]
    if not usable:
        return None, "nothing could run"
    good = [p for p in usable if p.meets(slo)]
    if good:
        why = "of those whose p99 keep the SLO" if slo else "of all"
        found = max(good, key=lambda p: p.metrics["output_tokens_per_s"])
        return found, f"most output tokens a second {why}"
    found = max(usable, key=lambda p: p.metrics.get("goodput", 0.0))
    return found, "none keeps the SLO at p99; most requests a second that keep it"
