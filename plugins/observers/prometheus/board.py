"""One block of shared memory that holds all numbers: a section for the engine, one for each API
process. Everybody writes into its own section only and reads all of them.

The memory has no name: it is handed down as an open file, and gone with the last process. It
outlives an engine or an API process that is started again, so that counters go on where they were.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import fsum
from types import TracebackType
from typing import Self

from octavo.plugins.observers.prometheus.families import API, ENGINE, Family

_SIZE = 8  # bytes of a float64


def _length(families: Sequence[Family]) -> int:
    return sum(family.width * len(family.values) for family in families)


class Histogram:
    """Counts by bucket, and a sum."""

    __slots__ = ("_at", "_bounds", "_numbers", "_sum")

    def __init__(self, numbers: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._numbers, self._at, self._bounds = numbers, at, bounds
        self._sum = at + len(bounds) + 1

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        numbers = self._numbers
        numbers[self._at + bisect_left(self._bounds, value)] += times
        numbers[self._sum] += value * times


class Section:
    """The numbers of one writer. `numbers` is a view of float64s; `at` says which is which."""

    def __init__(self, numbers: memoryview[float], families: tuple[Family, ...]) -> None:
        self.numbers, self.families = numbers, families
        self._at: dict[tuple[str, str], int] = {}
        for (family, value), at in _places(families):
            self._at[family.name, value] = at
        self.reset_gauges()

    def at(self, name: str, value: str = "") -> int:
        """Index into `numbers` of a counter or gauge, for one value of its label."""
        return self._at[name, value]

    def histogram(self, name: str) -> Histogram:
        """One of the histograms."""
        (family,) = (family for family in self.families if family.name == name)
        return Histogram(self.numbers, self._at[name, ""], family.buckets)

    def reset_gauges(self) -> None:
        """What an earlier writer of the section left is true no more."""
        for family in self.families:
            if family.kind == "gauge":
                for value in family.values:
                    self.numbers[self._at[family.name, value]] = 0.0


def _places(families: Sequence[Family]) -> Iterator[tuple[tuple[Family, str], int]]:
    at = 0
    for family in families:
        for value in family.values:
            yield (family, value), at
            at += family.width


class Board:
    """fd: of the shared memory, None when it is this process's alone. num_api: API processes."""

    def __init__(self, fd: int | None, num_api: int) -> None:
        self.fd, self.num_api = fd, num_api
        engine, api = _length(ENGINE), _length(API)
        count = engine + num_api * api
        self._memory = mmap.mmap(-1 if fd is None else fd, count * _SIZE)
        numbers: memoryview[float] = memoryview(self._memory).cast("d")
        self._engine = numbers[:engine]
        self._api = [
            numbers[engine + index * api : engine + (index + 1) * api] for index in range(num_api)
        ]

    @classmethod
    def create(cls, num_api: int) -> Self:
        """New memory, all zeros, that can be handed down."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("octavo-metrics")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, (_length(ENGINE) + num_api * _length(API)) * _SIZE)
        return cls(fd, num_api)

    def close(self) -> None:
        """Hand it down no more; who has a section keeps it."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def engine(self) -> Section:
        """The engine's section, for its writer: gauges start at zero."""
        return Section(self._engine, ENGINE)

    def api(self, index: int) -> Section:
        """An API process's section, for its writer."""
        return Section(self._api[index], API)

    def totals(self) -> dict[tuple[str, str], list[float]]:
        """All numbers, API processes added up: by metric and value of its label the one number of a
        counter or gauge, or a histogram's counts (one a bucket, not cumulative) and its sum."""
        found: dict[tuple[str, str], list[float]] = {}
        for (family, value), at in _places(ENGINE):
            found[family.name, value] = list(self._engine[at : at + family.width])
        for (family, value), at in _places(API):
            rows = [section[at : at + family.width] for section in self._api]
            found[family.name, value] = [fsum(column) for column in zip(*rows, strict=True)]
        return found
