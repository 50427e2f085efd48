"""What attention backends send to the device in a plan, and into a KV cache."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.upload import upload


class Staged:
    """int32 numbers that go to the device each step.

    One pinned buffer is enough: before the next plan, what the last one copied has arrived. Nothing
    is ever moved, since captured graphs know the address.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._device = torch.zeros(size, dtype=torch.int32, device=device)

    def fill(self, values: NDArray[Any]) -> torch.Tensor:
        """A view of the device's memory that holds the values, in stream order. What is larger than
        the limits of the context gets memory of its own."""
        size = values.size
        if size > self._host.numel():
            return upload(values.astype(np.int32, copy=False), self._device.device)
        self._host.numpy()[:size] = values
        return self._device[:size].copy_(self._host[:size], non_blocking=True)


def as_cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in the dtype of a KV cache. What 8-bit floats cannot hold becomes their
    largest value: torch before 2.12 makes NaN of it."""
    if dtype == x.dtype:
        return x
    if dtype.is_floating_point and dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)
