"""Numbers that a plan sends to the device, at a fixed address."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray


class Staged:
    """int32 numbers that go to the device each step.

    One pinned buffer is enough: before the next plan, all that the last one launched has run. It
    grows for batches beyond the limits of the context; it is then pinned again, and elsewhere.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._allocate(size, device)

    def _allocate(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def fill(self, values: NDArray[Any]) -> torch.Tensor:
        """A view of the device's memory that holds the values, in stream order."""
        size = values.size
        if size > self._host.numel():
            self._allocate(2 * size, self._device.device)
        self._host.numpy()[:size] = values
        return self._device[:size].copy_(self._host[:size], non_blocking=True)
