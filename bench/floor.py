"""What a machine can do at best: the time below which no engine can do a given work on this CPU.

Bytes a second are of reading memory, operations a second of multiply-adds in registers, both
measured with all threads and the vectors that the native kernels use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.bench.workload import Shape

READ_BYTES = 256 * 2**20
ROUNDS = 10**7
TRIES = 5


@dataclass(frozen=True)
class Machine:
    """bytes_per_s: of reading. flops: float32 operations a second, a multiply-add counting two.
    isa: of the kernels that were measured."""

    bytes_per_s: float
    flops: float
    isa: str


@dataclass(frozen=True)
class Work:
    """A model. layers, head: parameters that a token goes through. layer_bytes, head_bytes: what
    those take in memory."""

    layers: int
    head: int
    layer_bytes: int
    head_bytes: int


def measure_machine(threads: int) -> Machine:
    """The best of a few tries. Raises `PluginUnavailable` without a C compiler."""
    import torch

    from octavo.backends.cpu import native

    library = native.kernels()
    memory = torch.zeros(READ_BYTES // 4)
    out = torch.tensor([0.5, 0.5, 0.0])
    read = _best(lambda: library.octavo_measure_read(memory.data_ptr(), len(memory), threads))
    each = library.octavo_measure_multiply(1, threads, out.data_ptr())
    multiply = _best(lambda: library.octavo_measure_multiply(ROUNDS, threads, out.data_ptr()))
    return Machine(
        READ_BYTES / read, each * ROUNDS * threads / multiply, library.octavo_isa().decode()
    )


def _best(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(TRIES):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def decode_floor(machine: Machine, work: Work, rows: int) -> float:
    """Seconds of a step that decodes one token of `rows` sequences: all weights are read once, or
    multiplied once a row, whichever takes longer. Attention is left out."""
    read = (work.layer_bytes + work.head_bytes) / machine.bytes_per_s
    return max(read, 2 * (work.layers + work.head) * rows / machine.flops)


def floor(machine: Machine, work: Work, shape: Shape) -> float:
    """Seconds of the whole work: prompts, of which only the last token needs the head, then one
    step for each further token of all sequences together."""
    tokens = shape.num_prompts * shape.input_len
    operations = 2 * (work.layers * tokens + work.head * shape.num_prompts)
    read = (work.layer_bytes + work.head_bytes) / machine.bytes_per_s
    prefill = max(read, operations / machine.flops)
    return prefill + (shape.output_len - 1) * decode_floor(machine, work, shape.num_prompts)
