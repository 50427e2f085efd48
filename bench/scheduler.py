"""`octavo bench scheduler`: what scheduling costs, without a model.

The real scheduler, KV cache manager and message encoding run against an executor that answers at
once. Requests are staggered so that in each step one in `block_size` crosses a block border.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.core.config.models import Choice
from octavo.core.contracts.executor import Executor, Ticket, WorkerReport
from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.preemption_policy import PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext
from octavo.core.messages import (
    Codec,
    EngineOutputs,
    EngineRequest,
    LogitMasks,
    StepPlan,
    StepResult,
)
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.core.scheduler.scheduler import Scheduler, SchedulerLimits

VOCAB = 32000
_OUTPUT = 100_000


class InstantExecutor(Executor):
    """Answers every plan at once with one and the same token."""

    def __init__(self) -> None:
        self._results: dict[int, StepResult] = {}

    def start(self) -> WorkerReport:
        raise RuntimeError("InstantExecutor has no model to report on")

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        pass

    def submit(self, plan: StepPlan) -> Ticket:
        tokens = np.full((len(plan.sample_rows), 1), 11, np.int32)
        self._results[plan.step] = StepResult(step=plan.step, token_ids=tokens)
        return Ticket(plan.step)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        pass

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)


def make_scheduler(
    running: int, prompt_len: int, block_size: int, policy: str, manager: str
) -> Scheduler:
    """A scheduler with room for `running` sequences of the prompt and what the run generates."""
    registry = Registry.discover()
    max_model_len = prompt_len + _OUTPUT
    budget = max(running, 8192)
    blocks = running * -(-(prompt_len + 4096) // block_size) + 1

    def make(kind: str, name: str, context: Any) -> Any:
        return registry.create(registry.select(kind, Choice(name=name)), context)

    return Scheduler(
        SchedulerLimits(running, budget, max_model_len, VOCAB, block_size),
        make(
            "kv_cache_manager",
            manager,
            KVCacheManagerContext(blocks, block_size, running, max_model_len),
        ),
        make(
            "scheduler_policy",
            policy,
            SchedulerPolicyContext(running, budget, time.monotonic),
        ),
        make("preemption_policy", "recompute", PreemptionPolicyContext(1)),
        time.monotonic,
    )


def measure(
    running: int, prompt_len: int, steps: int, *, block_size: int, policy: str, manager: str
) -> dict[str, float]:
    """Milliseconds of schedule and commit in decode-only steps; microseconds of add_request."""
    scheduler = make_scheduler(running, prompt_len, block_size, policy, manager)
    executor, codec = InstantExecutor(), Codec(EngineOutputs)
    generator = np.random.default_rng(0)
    added = []
    for handle in range(running):
        tokens = generator.integers(20, VOCAB, prompt_len - handle % block_size, dtype=np.int32)
        request = EngineRequest(
            handle=handle,
            request_id=str(handle),
            token_ids=tokens,
            sampling=SamplingParams(max_tokens=None),
            seed=0,
            max_tokens=_OUTPUT,
            eos_token_ids=[2],
        )
        started = time.perf_counter()
        scheduler.add(request)
        added.append(time.perf_counter() - started)
    rows = []
    while len(rows) < steps:
        decode_only = len(scheduler.decoding) == running
        begin = time.perf_counter()
        plan = scheduler.plan()
        planned = time.perf_counter()
        assert plan is not None, "the scheduler has nothing to do"
        result = executor.collect(executor.submit(plan))
        collected = time.perf_counter()
        codec.encode(scheduler.commit(result))
        done = time.perf_counter()
        if decode_only:
            rows.append((planned - begin, done - collected))
    times = np.asarray(rows[len(rows) // 10 :]) * 1e3
    both = times.sum(axis=1)
    out = {"add_request_us": float(np.median(added) * 1e6)}
    for name, column in (("schedule", times[:, 0]), ("commit", times[:, 1]), ("total", both)):
        out[f"{name}_ms"] = float(np.median(column))
        out[f"{name}_ms_mean"] = float(column.mean())
        out[f"{name}_ms_p99"] = float(np.percentile(column, 99))
    return out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--running", type=int, default=256, help="sequences that decode")
    parser.add_argument("--prompt-len", type=int, default=512, help="prompt tokens of each")
    parser.add_argument("--steps", type=int, default=500, help="steps to measure")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--policy", default="fcfs", help="scheduler policy")
    parser.add_argument("--manager", default="paged", help="KV cache manager")
    parser.add_argument("--json", metavar="FILE", help="write the numbers to a file")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    numbers = measure(
        args.running,
        args.prompt_len,
        args.steps,
        block_size=args.block_size,
        policy=args.policy,
        manager=args.manager,
    )
    print(f"decode-only steps of {args.running} sequences, prompts of {args.prompt_len} tokens")
    for name in ("schedule", "commit", "total"):
        print(
            f"  {name:<9} median {numbers[f'{name}_ms']:.3f} ms"
            f"   mean {numbers[f'{name}_ms_mean']:.3f} ms   p99 {numbers[f'{name}_ms_p99']:.3f} ms"
        )
    print(f"  add_request median {numbers['add_request_us']:.0f} us")
    if args.json:
        settings = {"running": args.running, "prompt_len": args.prompt_len, "steps": args.steps}
        Path(args.json).write_text(json.dumps({**settings, **numbers}, indent=2) + "\n")
    return 0
