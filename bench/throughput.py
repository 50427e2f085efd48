"""`octavo bench throughput`: how fast a given number of equal requests is done, all sent at once.

Random prompts, greedy, ends of sequence ignored, so that every run does the same work. Two short
requests go first and are not timed. What is measured are the steps of the engine, without text.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench.arguments import positive, writable
from octavo.bench.environment import machine, peak_device_bytes, peak_rss_bytes, versions
from octavo.bench.result_file import write_json
from octavo.bench.step_recorder import StepRecorder
from octavo.bench.token_times import TokenTimes
from octavo.bench.workload import Shape, random_prompts, requests
from octavo.core.errors import ConfigError
from octavo.core.messages import EngineRequest

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore

WARM_UP_PROMPTS, WARM_UP_TOKENS = 2, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's own flags, and those that `serve` takes for the model and its engine. Of the
    latter, `--seed` also chooses the prompts."""
    from octavo.server.command_line.config import add_config_arguments

    add_config_arguments(parser)
    own = parser.add_argument_group("benchmark")
    own.add_argument("--num-prompts", type=positive, default=32, help="number of requests (32)")
    own.add_argument(
        "--input-len", type=positive, default=128, help="prompt length in tokens (128)"
    )
    own.add_argument(
        "--output-len", type=positive, default=64, help="output tokens per request (64)"
    )
    own.add_argument("--json", metavar="FILE", type=writable, help="write the results as JSON")


def run_requests(
    engine: EngineCore,
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


def measure(
    engine: EngineCore,
    shape: Shape,
    vocab_size: int,
    seed: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    progress: bool = False,
) -> dict[str, Any]:
    """Warm up, run the timed requests, return the figures. Raises `RuntimeError` when a request
    did not generate exactly what it should."""
    from tqdm import tqdm

    warm = Shape(WARM_UP_PROMPTS, shape.input_len, min(shape.output_len, WARM_UP_TOKENS))
    warm_prompts = random_prompts(warm, vocab_size, (seed + 1) % 2**32)
    run_requests(engine, list(requests(warm_prompts, warm.output_len)))
    engine.timing.reset()
    recorder = StepRecorder(engine.executor, engine.scheduler.limits.max_num_seqs)
    engine.executor = recorder
    prompts = random_prompts(shape, vocab_size, seed)
    batch = list(requests(prompts, shape.output_len, first_handle=WARM_UP_PROMPTS))
    generated = shape.num_prompts * shape.output_len
    quiet = None if progress else True  # None: only on a terminal
    with tqdm(total=generated, unit="tok", desc="generating", disable=quiet) as bar:
        elapsed, times = run_requests(engine, batch, clock=clock, on_tokens=bar.update)
    engine.executor = recorder.executor
    wrong = times.check(shape.output_len)
    if wrong is not None:
        raise RuntimeError(f"the benchmark is not valid: {wrong}")
    metrics = engine.metrics()
    return {
        "elapsed_s": elapsed,
        "output_tokens_per_s": generated / elapsed,
        "total_tokens_per_s": (shape.num_prompts * shape.input_len + generated) / elapsed,
        "requests_per_s": shape.num_prompts / elapsed,
        **times.result(),
        "cached_prompt_tokens": times.cached_tokens,
        "num_preemptions": metrics["num_preemptions"],
        "num_steps": metrics["num_steps"],
        "step_phases": metrics["phases"],
        "plugin_times": metrics.get("plugin_times", {}),
        "steps": recorder.records(),
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """The result for people."""
    shape = result["workload"]
    text = [
        f"{result['model']}: {shape['num_prompts']} requests, {shape['input_len']} tokens in, "
        f"{shape['output_len']} out, seed {shape['seed']}",
        f"  elapsed          {result['elapsed_s']:10.2f} s",
        f"  output           {result['output_tokens_per_s']:10.1f} tokens/s",
        f"  input and output {result['total_tokens_per_s']:10.1f} tokens/s",
        f"  startup          {result['startup_s']:10.2f} s",
        f"  peak memory      {result['peak_rss_bytes'] / 2**20:10.0f} MiB",
    ]
    if result["peak_device_bytes"] is not None:
        text.append(f"  device memory    {result['peak_device_bytes'] / 2**20:10.0f} MiB")
    text.append(f"  {'milliseconds':22s}{'mean':>10s}{'p50':>10s}{'p95':>10s}{'p99':>10s}")
    for title, key in (("time to first token", "ttft_s"), ("inter-token latency", "itl_s")):
        figures = "".join(f"{result[key][p] * 1e3:10.1f}" for p in ("mean", "p50", "p95", "p99"))
        text.append(f"  {title:22s}{figures}")
    steps = f"step phase ({result['num_steps']} steps)"
    text.append(f"  {steps:22s}{'median':>10s}{'p99':>10s}{'share':>10s}")
    for name, phase in result["step_phases"].items():
        figures = f"{phase['median_ms']:10.3f}{phase['p99_ms']:10.3f}{phase['share']:10.1%}"
        text.append(f"    {name:20s}{figures}")
    if result["plugin_times"]:
        text.append(f"  {'plugin':30s}{'calls':>10s}{'seconds':>10s}")
    for name, times in result["plugin_times"].items():
        text.append(f"    {name:28s}{times['calls']:10d}{times['seconds']:10.3f}")
    return text


def main(args: argparse.Namespace) -> int:
    """Run the benchmark that the command line asks for. Returns the exit status."""
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.server.command_line.config import config_from_args

    started = time.perf_counter()
    seed = args.seed or 0
    if not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ConfigError(
            f"--seed: expected 0 to {2**32 - 1}, as prompts are made of it, got {seed}"
        )
    config, registry = config_from_args(args)
    resolved = resolve(config, registry)
    tell = partial(print, file=sys.stderr)
    engine = build_engine(resolved, registry, tell)
    tell("\n".join(engine.report.lines()))
    shape = Shape(args.num_prompts, args.input_len, args.output_len)
    result: dict[str, Any] = {
        "benchmark": "throughput",
        "model": resolved.config.model.source,
        "workload": {**vars(shape), "seed": seed},
        "startup_s": time.perf_counter() - started,
    }
    try:
        vocab_size = engine.scheduler.limits.vocab_size
        result |= measure(engine, shape, vocab_size, seed, progress=True)
        result |= {
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": peak_device_bytes(),
            "startup": engine.report.as_dict(),
        }
    except RuntimeError as exc:
        tell(f"octavo: {exc}")
        return 1
    finally:
        engine.close()
    result |= {
        "config": resolved.config.model_dump(mode="json"),
        "versions": versions(),
        "machine": machine(),
    }
    print("\n".join(lines(result)))
    if args.json is not None:
        write_json(args.json, result)
    return 0
