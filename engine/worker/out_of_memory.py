"""What the start of a worker says when the device, or this machine, has no memory left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch

from octavo.core.byte_sizes import size
from octavo.core.errors import CapacityError
from octavo.engine.worker.memory import free_host_memory

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMG]iB|B)\b")
_TEXTS = ("out of memory", "can't allocate memory")
"""In what torch raises for a device, and for a CPU."""


class Phase(Enum):
    """A part of the start, and the keys of the configuration that make it need less."""

    WEIGHTS = "loading the weights", "model.quantization, model.dtype, or a smaller model"
    STEP = (
        "measuring a step",
        "scheduler.max_num_batched_tokens, scheduler.max_num_seqs, model.quantization, model.dtype",
    )
    POOL = (
        "making the KV cache",
        "less of kv_cache.memory_utilization, kv_cache.memory_bytes or kv_cache.num_blocks; where "
        "the host's memory is short, of preemption.swap_space and kv_cache.host_cache_bytes",
    )


@contextmanager
def out_of_memory(phase: Phase, device: torch.device, of: str = "") -> Iterator[None]:
    """An allocation that fails inside becomes a `CapacityError`. of: how large the thing is."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, torch.OutOfMemoryError) and not any(
            part in text.lower() for part in _TEXTS
        ):
            raise
        doing, helps = phase.value
        raise CapacityError(
            f"out of memory while {doing}{of}: {_asked(text)}{_there(device)}. What helps: "
            f"{helps}; `octavo plan MODEL` tells beforehand what a model needs"
        ) from error


def _asked(text: str) -> str:
    found = _ASKED.search(text)
    if found is None:
        return ""
    number, unit = found.groups()
    amount = size(int(number)) if unit == "bytes" else f"{number} {unit}"
    return f"{amount} more were needed, and "


def _there(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{size(free_host_memory())} are free on this machine"
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return (
        f"{size(free)} of {size(total)} are free on {device}, where this process holds {size(own)}"
        f" and other processes and the driver {size(max(0, total - free - own))}"
    )
