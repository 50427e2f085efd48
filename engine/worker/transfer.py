"""Tensors on their way from the device to the host, and the end of copies the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray


class HostCopy:
    """Copies that were launched in stream order. On a CPU they are the tensors themselves."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # On CUDA the copies land in pinned memory, and the call does not wait for them.
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._done: Any = None
        if any(tensor.is_cuda for tensor in tensors):
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def wait(self) -> list[NDArray[Any]]:
        """The values, once the device has come that far."""
        if self._done is not None:
            self._done.synchronize()
            self._done = None
        return [tensor.numpy() for tensor in self._tensors]


class Fence:
    """Lets the host write pinned memory again when the copies from it are done."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Behind everything that was launched so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the device has passed the last `set`."""
        if self._event is not None:
            self._event.synchronize()
