"""Small host arrays on their way to the device, without waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def pinned(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor of the host with the array's values and dtype (intp as int64), from which the device
    can copy without anybody waiting. For a CPU the tensor may share the array's memory."""
    # torch takes no arrays that cannot be written, as those of a decoded message.
    host = torch.from_numpy(np.require(array, requirements=("C", "W")))
    return host if device.type == "cpu" else host.pin_memory()


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A tensor on the device with the array's values and dtype (intp as int64).

    A copy from pageable memory waits until everything that was launched before it is done. This one
    is made from pinned memory, in stream order; the allocator keeps that memory until the copy has
    run. On a CPU the tensor may share the array's memory.
    """
    return pinned(array, device).to(device, non_blocking=True)
