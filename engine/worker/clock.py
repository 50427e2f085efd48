"""How long the device worked on what, without waiting for it."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import torch


class DeviceClock(ABC):
    """Marks between launches, and the time between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """A point between what was launched before and what is launched after it."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """What the device spent between two marks. Waits until it has passed the second."""


class HostClock(DeviceClock):
    """Where a launched operation has run when the call returns."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class CudaClock(DeviceClock):
    """Events in the current stream. cuda: `torch.cuda`, or a double of it."""

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return 1e-3 * float(begin.elapsed_time(end))


def device_clock(device: torch.device) -> DeviceClock:
    """The one that suits a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
