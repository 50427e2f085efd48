"""What a round of one side leaves behind, as plain data, and in which order sides take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.bench.load.answers import Answer, over_time, samples, totals
from octavo.bench.slo import Slo


def round_data(answers: Sequence[Answer], seconds: float, slo: Slo) -> dict[str, Any]:
    """Figures of a round; seconds unless a name says otherwise."""
    errors: dict[str, int] = {}
    for answer in answers:
        if answer.error is not None:
            errors[answer.error] = errors.get(answer.error, 0) + 1
    found = totals(answers, seconds, slo)
    times = samples(answers)
    return {
        **found,
        "seconds": seconds,
        "slo": bool(slo),
        "errors": errors,
        "samples": {name: times[name] for name in ("ttft", "itl", "e2e")},
        "throughput": over_time(answers, seconds),
        "prefix_hit_rate": found["cached_tokens"] / max(1, found["prompt_tokens"]),
    }


def turns(sides: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(round, side) in the order in which they run: A B, B A, A B, ... so that what drifts or goes
    to and fro slowly hits every side alike."""
    for number in range(rounds):
        order = range(sides) if number % 2 == 0 else reversed(range(sides))
        for side in order:
            yield number, side
