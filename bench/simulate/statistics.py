"""Figures of a run in bounded memory: distributions, and series over time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)


class Distribution:
    """Values of at least 0. Exact up to `exact` of them; then they are counted in bins 0.5% wide,
    which is how far a percentile may be off. `count`, `mean` and `largest` stay exact."""

    _WIDTH, _LEAST, _BINS = float(np.log(1.005)), 1e-6, 6000

    def __init__(self, exact: int = 100_000) -> None:
        self.sum, self.largest = 0.0, 0.0
        self._count = 0
        self._exact = exact
        self._buffer = np.empty(8192)
        self._used = 0
        self._kept: list[Float64] = []
        self._bins: NDArray[np.int64] | None = None

    def add(self, values: Float64) -> None:
        """Count these values."""
        size = len(values)
        if self._used + size > len(self._buffer):
            self._flush()
        if size > len(self._buffer):
            self._take(values.copy())
            return
        self._buffer[self._used : self._used + size] = values
        self._used += size

    def _flush(self) -> None:
        if self._used:
            self._take(self._buffer[: self._used].copy())
            self._used = 0

    def _take(self, values: Float64) -> None:
        self._count += len(values)
        self.sum += float(values.sum())
        self.largest = max(self.largest, float(values.max()))
        if self._bins is not None:
            self._fold(values)
            return
        self._kept.append(values)
        if self._count > self._exact:
            self._bins = np.zeros(self._BINS, np.int64)
            self._fold(np.concatenate(self._kept))
            self._kept = []

    def _fold(self, values: Float64) -> None:
        assert self._bins is not None, "nothing to fold into"
        logs = np.log(np.maximum(values, self._LEAST) / self._LEAST) / self._WIDTH
        which = np.minimum(logs.astype(np.int64), self._BINS - 1)
        self._bins += np.bincount(which, minlength=self._BINS)

    @property
    def count(self) -> int:
        self._flush()
        return self._count

    @property
    def mean(self) -> float:
        return self.sum / self.count if self.count else 0.0

    def percentiles(self, which: Any) -> Float64:
        """Values below which so many percent lie; zeros when there is nothing."""
        ranks = np.asarray(which, np.float64)
        if not self.count:
            return np.zeros_like(ranks)
        if self._bins is None:
            return np.asarray(np.percentile(np.concatenate(self._kept), ranks))
        wanted = np.maximum(ranks / 100 * self.count, 0.5)  # rank 0 is the least value
        at = np.searchsorted(np.cumsum(self._bins), wanted, side="left")
        middle = self._LEAST * np.exp((np.minimum(at, self._BINS - 1) + 0.5) * self._WIDTH)
        return np.asarray(np.minimum(middle, self.largest))

    def summary(self) -> dict[str, float]:
        """`mean`, `p50`, `p90`, `p95`, `p99` and `max`."""
        values = self.percentiles(PERCENTILES)
        named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
        return {"mean": self.mean, **named, "max": self.largest}

    def curve(self, points: int = 101) -> list[float]:
        """Values at evenly spaced percentiles, for a plot."""
        return [float(v) for v in self.percentiles(np.linspace(0, 100, points))]


class Series:
    """Means over time of several columns, over at most `capacity` equal spans. When a run outgrows
    them, two neighbours become one. What nothing was added for counts as 0."""

    def __init__(self, columns: tuple[str, ...], capacity: int = 512, width: float = 1.0) -> None:
        self.columns, self.width = columns, width
        self._capacity = capacity
        self._sums = np.zeros((capacity, len(columns)))
        self._end = 0.0

    def add(self, moment: float, seconds: float, values: tuple[float, ...]) -> None:
        """The `values` held during the `seconds` before `moment`."""
        while moment >= self._capacity * self.width:
            self._halve()
        self._end = max(self._end, moment)
        begin = moment - seconds
        while seconds > 0:
            index = int(begin / self.width)
            part = min(seconds, (index + 1) * self.width - begin)
            if part <= 1e-12 * self.width:  # rounding has left us at the border of a span
                index, part = index + 1, min(seconds, self.width)
            self._sums[min(index, self._capacity - 1)] += np.multiply(values, part)
            begin += part
            seconds -= part

    def _halve(self) -> None:
        half = self._capacity // 2
        self._sums[:half] = self._sums[0::2] + self._sums[1::2]
        self._sums[half:] = 0
        self.width *= 2

    def as_dict(self) -> dict[str, list[float]]:
        """`time` (seconds, the begin of each span) and the columns."""
        count = int(self._end / self.width) + 1
        begins = np.arange(count) * self.width
        spans = np.maximum(np.minimum(self._end - begins, self.width), 1e-12)
        means = self._sums[:count] / spans[:, None]
        out = {"time": begins.tolist()}
        return out | {name: means[:, i].tolist() for i, name in enumerate(self.columns)}


def jain(values: Float64) -> float:
    """Jain's fairness index (Jain, Chiu, Hawe, 1984): 1 when all are equal, 1 / n when one has
    everything; 1 for nothing at all."""
    total = float((values**2).sum()) * len(values)
    return float(values.sum() ** 2 / total) if total > 0 else 1.0
