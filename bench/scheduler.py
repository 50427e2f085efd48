"""`octavo bench scheduler`: what scheduling costs, without a model.

The real scheduler, policy, KV cache manager, input preparation and message encoding run; only the
forward pass is missing. Two loads are measured:

decode   All sequences decode, staggered so that in each step one in `block_size` crosses a block
         border.
mixed    Churn: sequences generate 20 to 300 tokens, a new one takes the slot of each that ends, and
         prompts are computed in chunks beside the decodes. Only steps with prefill count.

`schedule` is `Scheduler.plan`; `prepare` is the worker's mirror and flat tensors; `commit` ends
when the message for the API process is encoded. What the KV cache manager puts off until the device
computes (hashing of full blocks) is `catch_up`: it delays no step and no message.

`reference_us` is the time of one fixed NumPy operation, measured between the steps: it tells how
fast the machine was meanwhile.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.result_file import write_json
from octavo.core.config.models import COMPOSED, ImplementationConfig
from octavo.core.contracts.kv_cache_manager import KVCacheManagerContext
from octavo.core.contracts.preemption_policy import PreemptionPolicyContext
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext
from octavo.core.messages import Codec, EngineOutputs, EngineRequest, StepPlan, StepResult
from octavo.core.registry import Registry
from octavo.core.sampling_params import SamplingParams
from octavo.engine.scheduler.scheduler import Scheduler
from octavo.engine.scheduler.step import SchedulerLimits

VOCAB = 32000
PHASES = ("schedule", "prepare", "commit", "catch_up")
Times = tuple[float, float, float, float]
"""Seconds of each phase in one step."""
_OUTPUT = 4096
_SHORTEST, _LONGEST = 20, 300


class Preparation:
    """The worker's part of a step up to the forward pass: mirror and flat tensors, on the CPU."""

    def __init__(self, running: int, max_model_len: int, block_size: int, budget: int) -> None:
        import torch

        from octavo.engine.worker.batch import BatchBuilder
        from octavo.engine.worker.mirror import Mirror

        self._mirror = Mirror(num_slots=running, max_model_len=max_model_len, block_size=block_size)
        self._builder = BatchBuilder(
            self._mirror, max_tokens=max(budget, running), device=torch.device("cpu")
        )

    def prepare(self, plan: StepPlan) -> None:
        """What precedes the forward pass."""
        self._mirror.apply(plan)
        self._batch = self._builder.build(plan)

    def finish(self, plan: StepPlan) -> StepResult:
        """What follows it: every row that samples gets one and the same token."""
        slots = self._batch.slots
        self._mirror.advance(slots, plan.counts)
        tokens = np.full((len(plan.sample_rows), 1), 11, np.int32)
        self._mirror.append(slots[plan.sample_rows], tokens[:, 0])
        return StepResult(step=plan.step, token_ids=tokens)


class Load:
    """A scheduler under load, stepped and timed."""

    def __init__(
        self, running: int, prompt_len: int, block_size: int, policy: Any, manager: str
    ) -> None:
        self.running, self.prompt_len, self.block_size = running, prompt_len, block_size
        self.budget = max(2048, 8 * running)
        self.max_model_len = prompt_len + _OUTPUT
        self.scheduler = self._make(policy, manager)
        self.worker = Preparation(running, self.max_model_len, block_size, self.budget)
        self._codec = Codec(EngineOutputs)
        self._random = np.random.default_rng(0)
        self._handle = 0
        self.added: list[float] = []
        self.references: list[float] = []
        self._operand = np.arange(1000)

    def _make(self, policy: Any, manager: str) -> Scheduler:
        registry = Registry.discover()
        blocks = self.running * -(-self.max_model_len // self.block_size) + 1

        def make(kind: str, choice: Any, context: Any) -> Any:
            return registry.create(
                registry.select(kind, ImplementationConfig.model_validate(choice)), context
            )

        def make_policy(choice: Any) -> Any:
            context = SchedulerPolicyContext(self.running, self.budget, time.monotonic, make_policy)
            return make("scheduler_policy", choice, context)

        context = KVCacheManagerContext(blocks, self.block_size, self.running, self.max_model_len)
        return Scheduler(
            SchedulerLimits(self.running, self.budget, self.max_model_len, VOCAB, self.block_size),
            make("kv_cache_manager", manager, context),
            make_policy(policy),
            make("preemption_policy", "recompute", PreemptionPolicyContext(1)),
            time.monotonic,
        )

    def add(self, prompt_len: int, max_tokens: int) -> None:
        """A request with a random prompt; `added` gets the seconds that taking it in cost."""
        handle = self._handle = self._handle + 1
        request = EngineRequest(
            handle=handle,
            request_id=str(handle),
            token_ids=self._random.integers(20, VOCAB, prompt_len, dtype=np.int32),
            sampling=SamplingParams(max_tokens=None),
            seed=0,
            max_tokens=max_tokens,
            eos_token_ids=[2],
            priority=handle % 3,
            user=f"user {handle % 7}",
        )
        started = time.perf_counter()
        self.scheduler.add(request)
        self.added.append(time.perf_counter() - started)

    def step(self) -> tuple[bool, Times, EngineOutputs]:
        """(whether it only decoded, seconds by phase, outputs)."""
        clock = time.perf_counter
        begin = clock()
        plan = self.scheduler.plan()
        planned = clock()
        assert plan is not None, "the scheduler has nothing to do"
        self.worker.prepare(plan)
        prepared = clock()
        self.scheduler.catch_up()
        caught_up = clock()
        result = self.worker.finish(plan)
        collected = clock()
        outputs = self.scheduler.commit(result)
        self._codec.encode(outputs)
        done = clock()
        decodes = plan.num_decodes == len(plan.slots)
        if plan.step % 8 == 0:
            self._time_reference()
        phases = planned - begin, prepared - planned, done - collected, caught_up - prepared
        return decodes, phases, outputs

    def _time_reference(self) -> None:
        started = time.perf_counter()
        for _ in range(20):
            self._operand + 1
        self.references.append((time.perf_counter() - started) / 20)

    def decode(self, steps: int, waiting: int = 0) -> Iterator[Times]:
        """Steps in which all sequences decode."""
        for number in range(self.running):
            self.add(self.prompt_len - number % self.block_size, _OUTPUT)
        while len(self.scheduler.slots.decoding) < self.running:
            self.step()
        for _ in range(waiting):
            self.add(16, 16)
        for _ in range(min(steps, _OUTPUT - self.running)):
            yield self.step()[1]

    def churn(self, steps: int) -> Iterator[Times]:
        """Steps with prefill while requests come and go, after all slots were taken twice."""

        def refill(count: int) -> None:
            for _ in range(count):
                self.add(self.prompt_len, int(self._random.integers(_SHORTEST, _LONGEST + 1)))

        refill(2 * self.running)
        ended = counted = 0
        while counted < steps:
            decodes, seconds, outputs = self.step()
            ended += len(outputs.finished)
            refill(len(outputs.finished))
            if ended > self.running and not decodes:
                counted += 1
                yield seconds


def summary(rows: list[Times], prefix: str = "") -> dict[str, float]:
    """Median, mean and 99th percentile in milliseconds of each phase, of schedule and commit
    together (`total`), the first tenth of the steps left out."""
    times = np.asarray(rows[len(rows) // 10 :]) * 1e3
    columns = dict(zip(PHASES, times.T, strict=True))
    columns["total"] = columns["schedule"] + columns["commit"]
    out = {}
    for name, column in columns.items():
        out[f"{prefix}{name}_ms"] = float(np.median(column))
        out[f"{prefix}{name}_ms_mean"] = float(column.mean())
        out[f"{prefix}{name}_ms_p99"] = float(np.percentile(column, 99))
    return out


def measure(
    running: int,
    prompt_len: int,
    steps: int,
    *,
    block_size: int = 16,
    policy: Any = "fcfs",
    manager: str = "paged",
    waiting: int = 0,
) -> dict[str, float]:
    """All numbers of one size: those of mixed steps begin with `mixed_`; `add_request_us` is the
    median for a prompt of `prompt_len` tokens, hashing included; `waiting_us` what `waiting`
    requests add to a decode-only step: the median difference to steps without them, taken in
    turn."""
    load = Load(running, prompt_len, block_size, policy, manager)
    decode, differences = [], []
    if waiting:
        crowded = Load(running, prompt_len, block_size, policy, manager)
        pairs = zip(load.decode(steps), crowded.decode(steps, waiting), strict=True)
        for alone, beside in pairs:
            decode.append(alone)
            differences.append(beside[0] + beside[2] - alone[0] - alone[2])
    else:
        decode = list(load.decode(steps))
    added = load.added[:running]
    churn = Load(running, prompt_len, block_size, policy, manager)
    mixed = list(churn.churn(steps))
    return {
        "add_request_us": float(np.median(added) * 1e6),
        "waiting_us": float(np.median(differences) * 1e6) if waiting else 0.0,
        "reference_us": float(np.median(load.references) * 1e6),
        "mixed_reference_us": float(np.median(churn.references) * 1e6),
        **summary(decode),
        **summary(mixed, "mixed_"),
    }


def policy_choice(text: str) -> Any:
    """`fcfs`, or `priority,fair` for a composition."""
    names = text.split(",")
    return {"name": COMPOSED, "policies": names} if len(names) > 1 else text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--running", type=int, default=256, help="running sequences")
    parser.add_argument("--prompt-len", type=int, default=512, help="prompt tokens per sequence")
    parser.add_argument("--steps", type=int, default=500, help="steps measured per load")
    parser.add_argument("--waiting", type=int, default=0, help="waiting requests")
    parser.add_argument("--block-size", type=int, default=16, help="tokens per KV block")
    parser.add_argument(
        "--policy",
        default="fcfs",
        help="scheduler policy, or several separated by commas: priority,fair",
    )
    parser.add_argument("--manager", default="paged", help="KV cache manager")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    settings = {
        name: getattr(args, name)
        for name in ("running", "prompt_len", "steps", "waiting", "block_size", "policy", "manager")
    }
    numbers = measure(
        args.running,
        args.prompt_len,
        args.steps,
        block_size=args.block_size,
        policy=policy_choice(args.policy),
        manager=args.manager,
        waiting=args.waiting,
    )
    for prefix, title in (("", "decode-only steps"), ("mixed_", "steps with prefill, churn")):
        print(f"{title}: {args.running} sequences, prompts of {args.prompt_len} tokens")
        print(f"  machine: one NumPy operation takes {numbers[f'{prefix}reference_us']:.2f} us")
        for name in (*PHASES, "total"):
            median, mean, p99 = (
                numbers[f"{prefix}{name}_ms{end}"] for end in ("", "_mean", "_p99")
            )
            label = {"total": "schedule + commit", "catch_up": "catch up"}.get(name, name)
            print(f"  {label:<17} median {median:.3f} ms   mean {mean:.3f} ms   p99 {p99:.3f} ms")
    if args.waiting:
        print(f"{args.waiting} waiting requests add {numbers['waiting_us']:.1f} us to a step")
    print(f"add_request median {numbers['add_request_us']:.0f} us")
    if args.json:
        write_json(Path(args.json), {**settings, **numbers})
    return 0
