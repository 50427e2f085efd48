"""Keys and values in the dtype of a KV cache."""

from __future__ import annotations

import torch


def to_cache_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values as the cache holds them. What 8-bit floats cannot hold becomes their largest
    value: torch before 2.12 makes NaN of it."""
    if dtype == x.dtype:
        return x
    if dtype.is_floating_point and dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        x = x.clamp(-most, most)
    return x.to(dtype)
