"""`octavo bench latency`: how long one batch takes from the first step to the last token.

The batch is sent at once, greedily and past any end of sequence; no text is made.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench.arguments import natural, positive, writable
from octavo.bench.environment import machine, peak_device_bytes, peak_rss_bytes, versions
from octavo.bench.load.answers import distribution, samples
from octavo.bench.load.engine import EngineDriver
from octavo.bench.result_file import write_json
from octavo.bench.workloads.spec import WorkloadSpec

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """vLLM's names, and the flags of `serve` for the model and its engine."""
    from octavo.server.command_line.config import add_config_arguments

    add_config_arguments(parser)
    own = parser.add_argument_group("benchmark")
    own.add_argument("--input-len", type=positive, default=32, help="prompt length in tokens (32)")
    own.add_argument("--output-len", type=positive, default=128, help="output tokens (128)")
    own.add_argument("--batch-size", type=positive, default=8, help="batch size (8)")
    own.add_argument("--num-iters-warmup", type=natural, default=10, help="warm-up iterations (10)")
    own.add_argument("--num-iters", type=positive, default=30, help="measured iterations (30)")
    own.add_argument(
        "--output-json", "--json", metavar="FILE", type=writable, help="write the results as JSON"
    )


def measure(
    engine: EngineCore, spec: WorkloadSpec, vocab_size: int, warm_up: int, iterations: int
) -> dict[str, Any]:
    """Run the batches, each with prompts of its own. Raises `RuntimeError` when a request did not
    generate what it should."""
    from tqdm import tqdm

    driver = EngineDriver(engine)
    latencies: list[float] = []
    answers = []
    for number in tqdm(range(warm_up + iterations), desc="batches", disable=None):
        run = driver.run(spec.calls(vocab_size, number))
        wrong = [a for a in run.answers if a.error or a.num_output != spec.output_len]
        if wrong:
            what = wrong[0].error or f"it has {wrong[0].num_output} of {spec.output_len} tokens"
            raise RuntimeError(f"the benchmark is not valid: {what}")
        if number >= warm_up:
            latencies.append(run.seconds)
            answers += run.answers
    times = samples(answers)
    return {
        "latencies": latencies,
        "latency_s": distribution(latencies),
        "ttft_s": distribution(times["ttft"]),
        "itl_s": distribution(times["itl"]),
    }


def lines(result: dict[str, Any]) -> list[str]:
    """For people."""
    spec = result["workload"]
    out = [
        f"{result['model']}: batches of {spec['num_requests']}, {spec['input_len']} tokens in, "
        f"{spec['output_len']} out, {len(result['latencies'])} times",
        f"  {'milliseconds':22s}" + "".join(f"{n:>10s}" for n in ("mean", "p50", "p90", "p99")),
    ]
    for title, key in (
        ("batch", "latency_s"),
        ("time to first token", "ttft_s"),
        ("inter-token latency", "itl_s"),
    ):
        figures = "".join(f"{result[key][p] * 1e3:10.1f}" for p in ("mean", "p50", "p90", "p99"))
        out.append(f"  {title:22s}{figures}")
    return out


def main(args: argparse.Namespace) -> int:
    """Run the command. Returns the exit status."""
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.server.command_line.config import config_from_args

    config, registry = config_from_args(args)
    resolved = resolve(config, registry)
    tell = partial(print, file=sys.stderr)
    engine = build_engine(resolved, registry, tell)
    spec = WorkloadSpec(
        num_requests=args.batch_size,
        input_len=args.input_len,
        output_len=args.output_len,
        seed=(args.seed or 0) % 2**32,
    )
    try:
        limits = engine.scheduler.limits
        if limits.max_num_seqs < args.batch_size:
            tell(f"note: only {limits.max_num_seqs} of a batch run at once (max_num_seqs)")
        found = measure(engine, spec, limits.vocab_size, args.num_iters_warmup, args.num_iters)
        result: dict[str, Any] = {
            "benchmark": "latency",
            "model": resolved.config.model.source,
            "workload": spec.as_dict(),
            **found,
            "avg_latency": found["latency_s"]["mean"],
            "peak_rss_bytes": peak_rss_bytes(),
            "peak_device_bytes": peak_device_bytes(),
            "startup": engine.report.as_dict(),
        }
    except RuntimeError as exc:
        tell(f"octavo: {exc}")
        return 1
    finally:
        engine.close()
    print("\n".join(lines(result)))
    if args.output_json is not None:
        result |= {"config": resolved.config.model_dump(mode="json")}
        result |= {"versions": versions(), "machine": machine()}
        write_json(args.output_json, result)
    return 0
