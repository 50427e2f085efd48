"""What a loaded model needs beside its weights, measured on a small pool before the real one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octavo.core.contracts.graph_runner import GraphRunner
from octavo.engine.worker import profile
from octavo.engine.worker.out_of_memory import Phase, out_of_memory
from octavo.engine.worker.runner_setup import RunnerSettings


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a `with` block to a mapping."""
    started = time.perf_counter()
    try:
        yield
    finally:
        phases[name] = time.perf_counter() - started


def measure(
    settings: RunnerSettings,
    graph_runner: GraphRunner,
    phases: dict[str, float],
    *,
    set_pool: Callable[[int], None],
    run: Callable[[int], None],
) -> tuple[profile.Profile, int]:
    """The profile of the largest batch, and bytes that captured passes will take. phases: seconds
    are added. set_pool: makes a pool of so many blocks. run: computes so many prompt tokens on it.
    Raises `CapacityError` when the device has no memory for that."""
    wanted, cuda = settings.max_num_batched_tokens, settings.device.type == "cuda"
    most = settings.max_num_seqs * settings.max_model_len
    if not cuda:  # there a smaller batch is measured, and scaled
        most = min(most, profile.MOST_TOKENS)
    largest = min(wanted or (profile.CUDA_BUDGET if cuda else most), most)
    rows = -(-largest // settings.max_model_len)
    blocks = rows * -(-settings.max_model_len // settings.block_size) + 1
    blocks = min(blocks, largest // settings.block_size + rows + 1)
    with out_of_memory(Phase.STEP, settings.device, f" of {largest:,} tokens"):
        set_pool(blocks)
        phases.update(graph_runner.compile())
        with timed(phases, "profile"):
            if cuda:
                found = profile.profile_cuda(run, largest, settings.device)
            else:
                found = profile.profile_cpu(run, largest if wanted is not None else None, most)
        with timed(phases, "estimate graphs"):
            graph_bytes = graph_runner.estimate_bytes()
    if not graph_bytes:
        del phases["estimate graphs"]
    return found, graph_bytes
