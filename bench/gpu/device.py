"""What the device can do: its name, how fast it reads memory, how fast it multiplies."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from octavo.bench.environment import machine
from octavo.bench.gpu.clocks import Clock

ROUNDS = 10


def facts(device: str) -> dict[str, Any]:
    """name, capability (None on a CPU), memory in bytes (None on a CPU), versions of CUDA and of
    the driver as far as torch tells them."""
    import torch

    if device == "cpu":
        return {"name": machine()["processor"], "capability": None, "memory_bytes": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def bandwidth(device: str, sizes: list[int], clock: Clock) -> dict[str, Any]:
    """Bytes a second, of sums over float32 (`read`) and of copies (`copy`, which read and write),
    for each size in bytes, warm; `bytes_per_s` is the best of all."""
    import torch

    found: dict[str, Any] = {"read": {}, "copy": {}}
    for size in sizes:
        source = torch.ones(size // 4, dtype=torch.float32, device=device)
        target = torch.empty_like(source)
        total = torch.empty((), dtype=torch.float32, device=device)
        seconds = clock.measure(partial(torch.sum, source, dim=0, out=total), count=ROUNDS)
        found["read"][str(size)] = size / seconds
        seconds = clock.measure(partial(target.copy_, source), count=ROUNDS)
        found["copy"][str(size)] = 2 * size / seconds
    found["bytes_per_s"] = max(*found["read"].values(), *found["copy"].values())
    return found


def free(device: str) -> None:
    """Give back what the measurements took."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()


def matmul(device: str, dtype: str, size: int, clock: Clock) -> dict[str, Any]:
    """Operations a second of a square product, a multiply-add counting two."""
    import torch

    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.empty_like(a)
    seconds = clock.measure(lambda: torch.mm(a, b, out=out), count=ROUNDS)
    return {"dtype": dtype, "size": size, "flops_per_s": 2 * size**3 / seconds}
