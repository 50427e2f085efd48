"""What a loaded model costs: bytes of weights, peak of a forward pass, tokens it computes in half a
second, and what that leaves for the KV pool."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.core.contracts.executor import DeviceMemory
from octavo.engine.worker.memory import (
    GIB,
    free_host_memory,
    peak_resident,
    reset_peak_resident,
)

STEP_SECONDS = 0.5
"""A full step on a CPU takes at most this long, so that decodes beside it stay fluent."""

_SHORT_PASS = 0.1
"""Seconds from which a timed pass is long enough to extrapolate from."""

_FIRST_PASS = 16
"""Tokens of the pass that makes what is made once."""

MOST_TOKENS = 8192
"""Largest batch that is profiled on a CPU, and largest `step_token_limit`."""

CUDA_BUDGET = 8192
"""Tokens a step that are prepared for on CUDA when the configuration leaves them open."""

_CPU_POOL = 4 * GIB
_CPU_SHARE = 4
"""On a CPU the pool takes at most this many bytes, and one part in this many of what is free."""


@dataclass(frozen=True)
class Profile:
    """activation_bytes: peak beside weights and KV of the largest batch. step_token_limit: see
    `WorkerReport`, None when it was not measured."""

    activation_bytes: int
    step_token_limit: int | None


def weight_size(model: torch.nn.Module) -> tuple[int, int]:
    """(parameters, bytes), tied ones once. Buffers count as bytes only; layers that hold weights in
    another form say how many parameters those are."""
    seen: set[int] = set()
    count = size = 0
    for tensor, is_parameter in (
        *((parameter, True) for parameter in model.parameters()),
        *((buffer, False) for buffer in model.buffers()),
    ):
        storage = tensor.untyped_storage().data_ptr()
        if storage in seen:
            continue
        seen.add(storage)
        count += tensor.numel() * is_parameter
        size += tensor.numel() * tensor.element_size()
    held = (getattr(module, "num_parameters", 0) for module in model.modules())
    return count + sum(number for number in held if isinstance(number, int)), size


def step_token_limit(run: Callable[[int], None], most: int) -> int:
    """Tokens of prefill that take `STEP_SECONDS`: a multiple of 16, from 64 to 8192.

    run: computes a batch of that many prompt tokens; it can take at most `most`. Sizes are doubled
    until a pass is long enough to extrapolate from. Of that size the fastest of three passes counts
    (of two, where a pass takes longer than a step should): other processes can only slow one down.
    """
    tokens, largest = min(64, most), min(most, MOST_TOKENS)
    seconds = _timed(run, tokens)
    while True:
        if seconds >= _SHORT_PASS or tokens >= largest:
            seconds = min(seconds, _timed(run, tokens))
        if seconds >= _SHORT_PASS or tokens >= largest:
            break
        tokens = min(tokens * 2, largest)
        seconds = _timed(run, tokens)
    if seconds < STEP_SECONDS:
        seconds = min(seconds, _timed(run, tokens))
    limit = int(tokens * STEP_SECONDS / max(seconds, 1e-6))
    return min(MOST_TOKENS, max(64, limit // 16 * 16))


def _timed(run: Callable[[int], None], tokens: int) -> float:
    start = time.perf_counter()
    run(tokens)
    return time.perf_counter() - start


def profile_cpu(run: Callable[[int], None], tokens: int | None, most: int) -> Profile:
    """Measure on a CPU. tokens: the step's budget, or None when it shall be found. A large budget
    is profiled by a smaller pass and scaled, since activations grow with tokens."""
    sample = min(tokens or 64, most, 256)
    before = reset_peak_resident()
    run(sample)  # the first pass of the process: later ones find memory that the allocator kept
    peak = max(0, peak_resident() - before)
    limit = step_token_limit(run, most) if tokens is None else None
    return Profile(peak * max(sample, tokens or limit or 0) // sample, limit)


def profile_cuda(run: Callable[[int], None], tokens: int, device: torch.device) -> Profile:
    """Measure the largest batch on a CUDA device. A small pass comes first: what is made and kept
    at a first call (workspaces of libraries, code) is not the batch's."""
    run(min(tokens, _FIRST_PASS))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run(tokens)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return Profile(peak, None)


def kv_budget_cpu(bytes_needed: int) -> int:
    """Bytes of the KV pool on a CPU; bytes_needed: what `max_num_seqs` requests of `max_model_len`
    take."""
    return min(_CPU_POOL, free_host_memory() // _CPU_SHARE, bytes_needed)


def kv_budget_cuda(
    device: torch.device,
    utilization: float,
    weights: int,
    activations: int,
    graphs: int,
    *,
    tables: int = 0,
) -> DeviceMemory:
    """Where the device's memory goes, and so what is left for the KV pool. weights: bytes of them,
    which are loaded; activations: see `Profile`; graphs: as estimated; tables: of logits
    processors, not made yet."""
    free, total = torch.cuda.mem_get_info(device)
    used, own = total - free, torch.cuda.memory_reserved(device)
    weights = min(weights, own)
    return DeviceMemory(
        total=total,
        utilization=utilization,
        weights=weights,
        activations=activations,
        graphs=graphs,
        buffers=own - weights,
        other=max(0, used - own),
        tables=tables,
    )
