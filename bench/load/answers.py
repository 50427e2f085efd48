"""What came back, and what follows from it. Times are seconds from the begin of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.bench.slo import Slo

Float64 = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)


@dataclass
class Answer:
    """One request. sent: when it was due. times, counts: arrivals of tokens, and how many came
    with each. num_output: as the engine counts, the sum of counts where it does not say.
    num_cached: prompt tokens found in the prefix cache. error: why it failed."""

    sent: float
    num_prompt: int = 0
    num_output: int = 0
    num_cached: int = 0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float = 0.0
    finish: str | None = None
    error: str | None = None
    text: str = ""

    @property
    def good(self) -> bool:
        """Whether it has tokens and no error."""
        return self.error is None and bool(self.times)

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        """From the moment it was due to its end."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for a single token."""
        if self.num_output < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_output - 1)


def distribution(values: Sequence[float] | Float64) -> dict[str, float]:
    """`mean`, `std`, `p50`, `p90`, `p95`, `p99`; zeros when there is nothing."""
    array = np.asarray(values, np.float64)
    if not len(array):
        return {"mean": 0.0, "std": 0.0, **{f"p{p}": 0.0 for p in PERCENTILES}}
    found = np.percentile(array, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, found, strict=True)}
    return {"mean": float(array.mean()), "std": float(array.std()), **named}


def samples(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """All times by what they measure: `ttft`, `itl` (between two arrivals of tokens), `tpot`,
    `e2e`."""
    good = [a for a in answers if a.good]
    gaps = [np.diff(a.times) for a in good if len(a.times) > 1]
    return {
        "ttft": [a.ttft for a in good],
        "itl": np.concatenate(gaps).tolist() if gaps else [],
        "tpot": [t for a in good if (t := a.tpot) is not None],
        "e2e": [a.e2e for a in good],
    }


def num_good(answers: Sequence[Answer], slo: Slo) -> int:
    """How many keep every target."""
    return sum(slo.met(a.ttft, a.tpot or 0.0, a.e2e) for a in answers if a.good)


def totals(answers: Sequence[Answer], seconds: float, slo: Slo) -> dict[str, Any]:
    """Counts and rates of a run that took `seconds`."""
    good = [a for a in answers if a.good]
    prompt, output = (sum(getattr(a, n) for a in good) for n in ("num_prompt", "num_output"))
    seconds = max(seconds, 1e-12)
    kept = num_good(answers, slo)
    return {
        "duration_s": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(a.num_cached for a in good),
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (prompt + output) / seconds,
        "goodput": kept / seconds,
        "good_fraction": kept / max(1, len(answers)),
    }


def over_time(answers: Sequence[Answer], seconds: float, spans: int = 60) -> dict[str, list[float]]:
    """Output tokens a second in equal spans of the run: `time` (their begins) and
    `output_tokens_per_s`."""
    moments = [t for a in answers for t in a.times]
    weights = [c for a in answers for c in a.counts]
    edges = np.linspace(0, max(seconds, 1e-9), spans + 1)
    tokens, _ = np.histogram(moments, edges, weights=weights)
    width = edges[1] - edges[0]
    return {"time": edges[:-1].tolist(), "output_tokens_per_s": (tokens / width).tolist()}
