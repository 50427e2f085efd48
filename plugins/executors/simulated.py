"""Executor `simulated`: no model runs; a step takes the time that a cost model says.

With a `VirtualClock` (`octavo simulate`) the clock is advanced by that time, with any other the
executor sleeps. Every sequence repeats one token of its own, from the lower half of the vocabulary.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from octavo.core.clock import VirtualClock
from octavo.core.contracts.executor import (
    DeviceMemory,
    Executor,
    ExecutorContext,
    Ticket,
    WorkerReport,
)
from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.provider import Options
from octavo.core.errors import ConfigError
from octavo.core.messages import LogitMasks, StepPlan, StepResult
from octavo.plugins.executors import accelerators
from octavo.plugins.executors.cost_model import (
    CostModel,
    RooflineModel,
    StepShape,
    StepTracker,
    fit,
)
from octavo.plugins.executors.model_size import ModelSize, model_size
from octavo.plugins.logits_processors.table_sizes import tables_bytes

PATH = "executor.kind"


class SimulatedOptions(Options):
    """One of `accelerator` and `fitted` is needed."""

    accelerator: str | dict[str, Any] | None = Field(
        default=None,
        description="A named profile (h100, h200, a100-80gb, l40s, ...), a YAML file like those, or"
        " a mapping with the same keys, where `base` names a profile that it changes.",
    )
    fitted: str | None = Field(
        default=None,
        description="Result of `octavo bench throughput --json FILE`: the cost model is fitted to "
        "its steps, and memory is what that run had.",
    )
    model: str | dict[str, Any] | None = Field(
        default=None,
        description="Keys of a config.json, or the path of one or of its folder, where "
        "`model.source` is not given. No weights are read.",
    )
    in_flight: int = Field(
        default=1, ge=1, le=8, description="Steps that may be outstanding, as in a real executor."
    )


@dataclass(frozen=True)
class Simulation:
    """What is simulated. device: `cuda` or `cpu`. memory_bytes: for weights, activations and KV
    (None: kv_bytes are measured)."""

    cost: CostModel
    model: ModelSize
    device: str
    memory_bytes: int | None
    kv_bytes: int | None
    activation_bytes: int | None
    step_token_limit: int | None
    note: str


class SimulatedExecutor(Executor):
    """num_steps, busy_s: what has been computed so far, in seconds of the clock. copied, swapped:
    tokens of KV that were copied. last: the newest step's shape."""

    computes = False

    def __init__(self, options: SimulatedOptions, context: ExecutorContext) -> None:
        self.max_in_flight = options.in_flight
        config = context.engine_config
        self._simulation = simulation(options, config, context.model_config)
        self._memory_share = config["kv_cache"]["memory_utilization"]
        self._block_size, self._dtype = config["kv_cache"]["block_size"], config["model"]["dtype"]
        self._budget = config["scheduler"]["max_num_batched_tokens"]
        slots = config["scheduler"]["max_num_seqs"]
        length = config["model"]["max_model_len"]
        self._tables = tables_bytes(slots, length, self._simulation.model.vocab_size)
        clock = context.clock
        self._advance = clock.advance if isinstance(clock, VirtualClock) else time.sleep
        self._tracker = StepTracker(slots, self._simulation.model.window)
        self._tokens = np.zeros(slots, np.int32)
        self._half = max(1, self._simulation.model.vocab_size // 2)
        self._pending: deque[tuple[StepResult, StepShape]] = deque()
        self.num_steps, self.busy_s = 0, 0.0
        self.copied = self.swapped = 0
        self.last: StepShape | None = None

    def start(self) -> WorkerReport:
        given, model = self._simulation, self._simulation.model
        activation = given.activation_bytes
        if activation is None:
            activation = _activation_bytes(model, self._budget)
        budget, memory = given.kv_bytes, None
        if budget is None:
            assert given.memory_bytes is not None, "a simulation knows its memory"
            memory = DeviceMemory(
                given.memory_bytes,
                self._memory_share,
                model.weight_bytes,
                activation,
                tables=self._tables,
            )
            budget = memory.pool
        return WorkerReport(
            kv_specs=tuple(
                KVSpec(layer, "full", model.num_kv_heads, model.head_size, model.head_size)
                for layer in range(model.num_layers)
            ),
            num_parameters=model.num_parameters,
            weight_bytes=model.weight_bytes,
            activation_bytes=activation,
            block_bytes=model.kv_bytes_per_token * self._block_size,
            kv_budget=budget,
            vocab_size=model.vocab_size,
            dtype=self._dtype,
            step_token_limit=given.step_token_limit,
            notes=(given.note,),
            memory=memory,
        )

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Nothing is stored."""

    def submit(self, plan: StepPlan) -> Ticket:
        for row in plan.admitted:
            self._tokens[row.slot] = row.handle * 2654435761 % self._half
        shape = self._tracker.follow(plan)
        sampling = plan.slots[plan.sample_rows]
        seconds = self._simulation.cost.seconds(shape)
        tokens = self._tokens[sampling][:, None]
        result = StepResult(step=plan.step, token_ids=tokens, forward_s=seconds)
        self._pending.append((result, shape))
        return Ticket(plan.step)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        """Masks do not matter: what is sampled is not simulated."""

    def collect(self, ticket: Ticket) -> StepResult:
        result, shape = self._pending.popleft()
        assert result.step == ticket, f"expected step {result.step}, got {ticket}"
        self._advance(result.forward_s)
        self.num_steps += 1
        self.busy_s += result.forward_s
        self.copied += shape.copied
        self.swapped += shape.swapped
        self.last = shape
        return result


def simulation(
    options: SimulatedOptions, config: Mapping[str, Any], model_config: Mapping[str, Any]
) -> Simulation:
    """Put options, the resolved configuration and config.json together. Raises `ConfigError`."""
    if (options.accelerator is None) == (options.fitted is None):
        raise ConfigError("expected one of `accelerator` and `fitted`", path=PATH)
    facts = model_config or model_facts(options)
    if not facts:
        raise ConfigError(
            "expected the model's config.json (or the path of one) in `model`, or model.source",
            path=f"{PATH}.model",
        )
    dtype, kv_dtype = config["model"]["dtype"], config["kv_cache"]["dtype"]
    model = model_size(facts, dtype, kv_dtype, config["model"]["quantization"]["name"])
    if options.accelerator is not None:
        device = accelerators.load(options.accelerator)
        cost = RooflineModel(device, model, dtype)
        limit = _token_limit(cost) if device.device == "cpu" else None
        what = device.summary or "an accelerator"
        note = f"simulated: {what}, cost model from its profile"
        return Simulation(cost, model, device.device, device.memory_bytes, None, None, limit, note)
    assert options.fitted is not None, "checked above"
    return _fitted(options.fitted, model)


def model_facts(options: SimulatedOptions) -> dict[str, Any]:
    """The config.json that the options give, empty when they give none."""
    given = options.model
    if given is None or isinstance(given, dict):
        return dict(given or {})
    path = Path(given).expanduser()
    path = path / "config.json" if path.is_dir() else path
    return _json(path, f"{PATH}.model")


def _json(path: Path, key: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as exc:
        raise ConfigError(f"cannot read '{path}': {exc}", path=key) from None
    if not isinstance(values, dict):
        raise ConfigError(f"'{path}': expected a JSON object", path=key)
    return values


def _fitted(name: str, model: ModelSize) -> Simulation:
    """From the result of a throughput benchmark."""
    key = f"{PATH}.fitted"
    run = _json(Path(name).expanduser(), key)
    try:
        cost = fit(run["steps"])
        start = run["startup"]
        memory = int(start["kv_bytes"]), int(start["activation_bytes"])
        budget, device = int(start["max_num_batched_tokens"]), str(start["device"])
    except (KeyError, TypeError, ValueError) as exc:
        why = f"it has no {exc}" if isinstance(exc, KeyError) else str(exc)
        raise ConfigError(
            f"'{name}': expected what `octavo bench throughput --json` writes: {why}", path=key
        ) from None
    note = f"simulated: fitted to {name}, mean error of a step {cost.error:.1%}"
    return Simulation(cost, model, device, None, *memory, budget, note)


def _token_limit(cost: CostModel, longest: float = 0.5) -> int:
    """Tokens of prefill that a step computes in `longest` seconds, as a CPU's worker measures."""
    count = 16
    while count < 8192:
        twice = StepShape(2 * count, 0, 1, 2 * count, 2 * count * count)
        if cost.seconds(twice) > longest:
            break
        count *= 2
    return count


def _activation_bytes(model: ModelSize, budget: int | str) -> int:
    """A rough bound: a few hidden states a token, and float32 logits of 256 rows."""
    tokens = budget if isinstance(budget, int) else 8192
    return tokens * model.hidden * 16 * model.other_bits // 8 + 256 * model.vocab_size * 4
