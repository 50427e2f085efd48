"""When tokens came, taken from the outputs of steps, and what follows from it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.messages import EngineOutputs

PERCENTILES = (50, 95, 99)


def summarize(seconds: NDArray[np.float64]) -> dict[str, float]:
    """Mean, p50, p95 and p99 in seconds (linear interpolation); zeros when there is nothing."""
    if not len(seconds):
        return {"mean": 0.0} | {f"p{p}": 0.0 for p in PERCENTILES}
    values = np.percentile(seconds, PERCENTILES)
    named = {f"p{p}": float(value) for p, value in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(seconds.mean())} | named


class TokenTimes:
    """Collects arrival times of the tokens of `num` requests with consecutive handles.

    Time to first token counts from `start`, when every request was there. An inter-token latency is
    the time between two steps that gave one request tokens.
    """

    def __init__(self, num: int, first_handle: int, start: float) -> None:
        self._base, self._start = first_handle, start
        self._last = np.full(num, np.nan)
        self._first = np.full(num, np.nan)
        self._gaps: list[NDArray[np.float64]] = []
        self.num_tokens = np.zeros(num, np.int64)
        self.reasons: dict[int, str] = {}
        self.cached_tokens = 0

    def record(self, outputs: EngineOutputs, now: float) -> int:
        """Take in one step's outputs that were there at `now`; the number of tokens they hold."""
        rows = outputs.handles - self._base
        width = outputs.token_ids.shape[1] if outputs.token_ids.ndim == 2 else 1
        counts = np.full(len(rows), width) if outputs.counts is None else outputs.counts
        rows, counts = rows[counts > 0], counts[counts > 0]
        gaps = now - self._last[rows]
        fresh = np.isnan(gaps)
        self._first[rows[fresh]] = now
        self._gaps.append(gaps[~fresh])
        self._last[rows] = now
        self.num_tokens[rows] += counts
        self.cached_tokens += sum(outputs.cached.values())
        for finish in outputs.finished:
            self.reasons[finish.handle - self._base] = finish.error or finish.reason
        return int(counts.sum())

    def check(self, output_len: int) -> str | None:
        """What is wrong when not every request ended by length with all of its tokens."""
        for row, count in enumerate(self.num_tokens):
            reason = self.reasons.get(row, "no end")
            if reason != "length" or count != output_len:
                return f"request {row} ended with {reason!r} after {count} of {output_len} tokens"
        return None

    def all_started_s(self) -> float:
        """Seconds until every request had its first token."""
        return float(self._first.max() - self._start)

    def result(self) -> dict[str, Any]:
        """`ttft_s` and `itl_s` as by `summarize`."""
        gaps = np.concatenate(self._gaps) if self._gaps else np.empty(0)
        return {"ttft_s": summarize(self._first - self._start), "itl_s": summarize(gaps)}
