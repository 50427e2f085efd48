"""What memory holds, in words: shared by the start of an engine, its worker and `octavo plan`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from octavo.core.byte_sizes import size

if TYPE_CHECKING:
    from octavo.core.contracts.executor import DeviceMemory


def shares(memory: DeviceMemory) -> Iterator[tuple[str, int, str]]:
    """(what, bytes, what makes it smaller) of everything that is there before the KV pool."""
    yield "weights", memory.weights, "model.quantization or model.dtype"
    yield (
        "activations",
        memory.activations,
        "scheduler.max_num_batched_tokens or scheduler.max_num_seqs",
    )
    yield "captured graphs", memory.graphs, "graph.runner (capture_sizes)"
    yield "the worker's buffers", memory.buffers, "scheduler.max_num_seqs"
    yield (
        "tables of logits processors",
        memory.tables,
        "scheduler.max_num_seqs or model.max_model_len",
    )
    yield "other processes and the driver", memory.other, "ending other processes"


def breakdown(memory: DeviceMemory) -> str:
    """`0.9 of 79.10 GiB are 71.19 GiB: 14.96 GiB for weights, ...`, without what takes nothing."""
    taken = ", ".join(f"{size(count)} for {what}" for what, count, _ in shares(memory) if count)
    allowed = size(int(memory.total * memory.utilization))
    return f"{memory.utilization:.3g} of {size(memory.total)} are {allowed}: {taken or 'all free'}"


def no_room(memory: DeviceMemory, needed: int) -> str:
    """Why there is no KV cache of `needed` bytes, and what would help, the largest part first."""
    missing = memory.taken + needed - int(memory.total * memory.utilization)
    parts = sorted(shares(memory), key=lambda part: -part[1])
    helps = dict.fromkeys(key for _, count, key in parts if count)
    if memory.utilization < 1:
        helps["kv_cache.memory_utilization"] = None
    return (
        f"no memory is left for the KV cache: {breakdown(memory)}; {size(needed)} are needed and "
        f"{size(memory.pool)} available, {size(missing)} too little, so that no context fits. What "
        f"helps: {', '.join(helps)}"
    )


def too_long(length: int, needed: int, available: int, longest: int) -> str:
    """That one sequence of `length` tokens does not fit. needed, available: bytes of KV cache.
    longest: tokens of the longest context that fits."""
    return (
        f"one sequence of {length:,} tokens needs {size(needed)} of KV cache and "
        f"{size(available)} are available; the longest context that fits is {longest:,} tokens"
    )
