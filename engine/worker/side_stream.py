"""Copies between device and host beside the computation, and what they took.

On CUDA they run on a stream of their own. Two events keep the order: a copy starts when what was
launched before it is done (it may read what that wrote), and what is launched after `join` starts
when the copies are done (it may write where they read, and read what they wrote). Elsewhere copies
are made at once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch


class SideStream(ABC):
    """Where a pool's copies from and to the host run."""

    @abstractmethod
    def run(self, copy: Callable[[], None]) -> None:
        """Make copies after everything that was launched so far."""

    @abstractmethod
    def join(self) -> None:
        """What is launched from now on comes after all copies. Costs nothing without any."""

    @abstractmethod
    def take(self) -> Callable[[], float]:
        """The copies since the last call, as a function that waits for them and says how many
        seconds they took."""


class InlineStream(SideStream):
    """Copies at once, on devices without streams."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def run(self, copy: Callable[[], None]) -> None:
        started = time.perf_counter()
        copy()
        self._seconds += time.perf_counter() - started

    def join(self) -> None:
        """They are done."""

    def take(self) -> Callable[[], float]:
        seconds, self._seconds = self._seconds, 0.0
        return lambda: seconds


class CudaSideStream(SideStream):
    """See the module. cuda: `torch.cuda`, or a double of it."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda, self._device = cuda, device
        self._stream = cuda.Stream(device)
        self._spans: list[tuple[Any, Any]] = []
        self._pending = False

    def run(self, copy: Callable[[], None]) -> None:
        cuda = self._cuda
        self._stream.wait_stream(cuda.current_stream(self._device))
        begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with cuda.stream(self._stream):
            begin.record(self._stream)
            copy()
            end.record(self._stream)
        self._spans.append((begin, end))
        self._pending = True

    def join(self) -> None:
        if self._pending:
            self._cuda.current_stream(self._device).wait_stream(self._stream)
            self._pending = False

    def take(self) -> Callable[[], float]:
        spans, self._spans = self._spans, []

        def seconds() -> float:
            if spans:
                spans[-1][1].synchronize()
            return 1e-3 * sum(float(begin.elapsed_time(end)) for begin, end in spans)

        return seconds


def side_stream(device: torch.device) -> SideStream:
    """The one that suits a device."""
    return CudaSideStream(device) if device.type == "cuda" else InlineStream()
