"""`octavo bench throughput`: how fast a given number of equal requests is done, all sent at once.

Random prompts, greedy, ends of sequence ignored, so that every run does the same work. Two short
requests go first and are not timed. What is measured are the steps of the engine, without text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from octavo.bench.environment import machine, peak_device_bytes, peak_rss_bytes, versions
from octavo.bench.latency import TokenTimes
from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.messages import EngineOutputs, EngineRequest

WARM_UP_PROMPTS, WARM_UP_TOKENS = 2, 16
PHASES = ("schedule", "prepare", "forward", "sample", "commit")


class Engine(Protocol):
    """The part of `EngineCore` that is used here."""

    def add(self, request: EngineRequest) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> EngineOutputs | None: ...


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive number, got {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags and those that `serve` takes for the model and its engine."""
    from octavo.server.cli import add_config_arguments

    add_config_arguments(parser)
    own = parser.add_argument_group("benchmark")
    own.add_argument("--num-prompts", type=positive, default=32, help="requests (default: 32)")
    own.add_argument("--input-len", type=positive, default=128, help="tokens a prompt (128)")
    own.add_argument("--output-len", type=positive, default=64, help="tokens generated each (64)")
    own.add_argument("--json", metavar="FILE", type=Path, help="also write the result there")


def run_requests(
    engine: Engine,
    batch: list[EngineRequest],
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_tokens: Callable[[int], object] = lambda count: None,
) -> tuple[float, TokenTimes]:
    """Send `batch` at once and step until it is done: seconds, and when its tokens came."""
    start = clock()
    times = TokenTimes(len(batch), batch[0].handle, start)
    for request in batch:
        engine.add(request)
    while engine.has_work():
        outputs = engine.step()
        if outputs is not None:
            on_tokens(times.record(outputs, clock()))
    return clock() - start, times


def measure(engine: Engine, shape: Shape, vocab_size: int, seed: int) -> dict[str, Any]:
    """Warm up, run the timed requests, return the figures."""
    warm = Shape(WARM_UP_PROMPTS, shape.input_len, min(shape.output_len, WARM_UP_TOKENS))
    warm_prompts = random_prompts(warm, vocab_size, (seed + 1) % 2**32)
    run_requests(engine, list(requests(warm_prompts, warm.output_len)))
    prompts = random_prompts(shape, vocab_size, seed)
    batch = list(requests(prompts, shape.output_len, first_handle=WARM_UP_PROMPTS))
    total = shape.num_prompts * shape.output_len
    with tqdm(total=total, unit="tok", desc="generating", disable=None) as bar:
        elapsed, times = run_requests(engine, batch, on_tokens=bar.update)
    wrong = times.check(shape.output_len)
    if wrong is not None:
        raise RuntimeError(f"the benchmark is not valid: {wrong}")
    num_input = shape.num_prompts * shape.input_len
    return {
        "elapsed_s": elapsed,
        "output_tokens_per_s": total / elapsed,
        "total_tokens_per_s": (num_input + total) / elapsed,
        "requests_per_s": shape.num_prompts / elapsed,
        "cached_prompt_tokens": times.cached_tokens,
    } | times.result()
