"""What every launch needs: sizes, and how fp8 tensors are handed over."""

from __future__ import annotations

import functools

import torch

from octavo.backends.triton.support import FP8_CAPABILITY, interpreting

FUSED = {"enable_fp_fusion": True}
"""Multiply and add may become one instruction."""

_CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2}

EXACT = {"enable_fp_fusion": False}
"""Every operation rounds: for results that are specified to the bit."""


def power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(0, n - 1).bit_length()


@functools.cache
def converts_fp8(device: torch.device) -> bool:
    """Whether the device converts 8-bit floats itself."""
    if device.type != "cuda" or interpreting():
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY


def byte_view(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor as a kernel gets it, and its `FP8` (see `convert`)."""
    code = _CODES.get(cache.dtype)
    if code is None or converts_fp8(cache.device):
        return cache, 0
    return cache.view(torch.uint8), code


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of the device; 1 on the host."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
