"""Host arrays on their way to the device, without waiting for it.

A copy from pageable memory waits until everything that was launched before it is done. One from
pinned memory is made in stream order, while the host goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def pin(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A host tensor with the array's values and dtype (intp as int64), pinned unless `device` is a
    CPU. For a CPU it may share the array's memory."""
    # torch takes no arrays that cannot be written, as those of a decoded message.
    host = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return host if device.type == "cpu" else host.pin_memory()


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor on the device with the array's values and dtype (intp as int64). torch's allocator
    keeps the pinned memory until the copy has run. On a CPU the tensor may share the array's
    memory."""
    return pin(array, device).to(device, non_blocking=True)


class PinnedTwin:
    """A host array and a tensor on the device at a fixed address, as captured graphs need it. On a
    CPU both are the same memory.

    Whoever writes the array waits first until the last copy from it has run: attention backends
    need not, since a plan begins only then.
    """

    def __init__(
        self, shape: int | tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._apart = device.type != "cpu"
        self._host = torch.zeros(shape, dtype=dtype, pin_memory=self._apart)
        self.array: NDArray[Any] = self._host.numpy()
        """The host's side; writing it changes nothing on the device before `push`."""
        self.tensor = torch.zeros(shape, dtype=dtype, device=device) if self._apart else self._host
        """The device's side."""

    def push(self, length: int) -> torch.Tensor:
        """Copy the first `length` entries to the device, in stream order; a view of them there."""
        sent = self.tensor[:length]
        return sent.copy_(self._host[:length], non_blocking=True) if self._apart else sent

    def fill(self, values: NDArray[Any]) -> torch.Tensor:
        """Write the array and push it; a view of the device's side. More values than the twin has
        room for get memory of their own."""
        size = len(values)
        if size > len(self.array):
            return upload(values.astype(self.array.dtype, copy=False), self.tensor.device)
        self.array[:size] = values
        return self.push(size)
