"""Clocks of a device: moments in its stream, and how long it was busy."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any


class Clock(ABC):
    """Marks lie in the order of the device's work; what it has yet to do comes before a mark."""

    @abstractmethod
    def mark(self) -> Any:
        """A moment, reached when everything that was launched before it is done."""

    @abstractmethod
    def between(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next. Waits for the last one."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device."""

    @abstractmethod
    def busy(self, run: Callable[[], object]) -> float | None:
        """Seconds in which the device worked while `run` ran; None where nothing tells."""

    def measure(self, run: Callable[[], object], warm: int = 3, count: int = 10) -> float:
        """The median of `count` runs in a row, after some that warm up."""
        for _ in range(warm):
            run()
        marks = [self.mark()]
        for _ in range(count):
            run()
            marks.append(self.mark())
        return sorted(self.between(marks))[count // 2]


class HostClock(Clock):
    """For a CPU, where a launch is the work."""

    def mark(self) -> float:
        return time.perf_counter()

    def between(self, marks: Sequence[float]) -> list[float]:
        return [after - before for before, after in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Nothing is under way."""

    def busy(self, run: Callable[[], object]) -> None:
        run()


class CudaClock(Clock):
    """CUDA events; busy times from the profiler's record of kernels and copies."""

    def mark(self) -> Any:
        import torch

        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, marks: Sequence[Any]) -> list[float]:
        marks[-1].synchronize()
        pairs = itertools.pairwise(marks)
        return [1e-3 * float(before.elapsed_time(after)) for before, after in pairs]

    def synchronize(self) -> None:
        import torch

        torch.cuda.synchronize()

    def busy(self, run: Callable[[], object]) -> float | None:
        from torch.autograd import DeviceType  # type: ignore[attr-defined]
        from torch.profiler import ProfilerActivity, profile

        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            run()
            self.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in found.events() or ()
            if event.device_type == DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        return 1e-6 * covered(spans) if spans else None


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what the spans cover together; kernels of two streams may overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def clock_of(device: str) -> Clock:
    """The clock of `cpu` or `cuda`."""
    return CudaClock() if device == "cuda" else HostClock()
