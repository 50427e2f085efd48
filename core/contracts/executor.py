"""Kind `executor`: where the model runs, and how a plan gets there.

The engine calls an executor from the engine thread only. Plans are executed in the order of
submission; a later plan sees everything an earlier one did.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NewType

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.provider import Provider, hookspec
from octavo.core.messages import LogitMasks, StepPlan, StepResult

Ticket = NewType("Ticket", int)


@dataclass(frozen=True)
class WorkerChoice:
    """An implementation used in place of one that could not be created."""

    name: str
    reason: str  # why this one was chosen
    distribution: str = ""
    refused: tuple[tuple[str, str], ...] = ()  # (name, why not) of those tried before


@dataclass(frozen=True)
class DeviceMemory:
    """Where a device's memory goes before the KV pool, in bytes."""

    total: int
    utilization: float  # fraction of `total` that may be used
    weights: int
    activations: int  # peak of a step, without weights and KV
    graphs: int = 0  # estimate for captured passes
    buffers: int = 0  # other memory of the worker
    other: int = 0  # other processes and the driver
    tables: int = 0  # what logits processors may allocate later

    @property
    def taken(self) -> int:
        """Everything but the pool."""
        own = self.weights + self.activations + self.graphs + self.buffers + self.tables
        return own + self.other

    @property
    def pool(self) -> int:
        """What is left for the KV pool."""
        return max(0, int(self.total * self.utilization) - self.taken)


@dataclass(frozen=True)
class WorkerReport:
    """What is known once the model is loaded and profiled. Sizes are bytes."""

    kv_specs: tuple[KVSpec, ...]  # one per layer
    num_parameters: int
    weight_bytes: int
    activation_bytes: int  # peak of a step, without weights and KV
    block_bytes: int  # one KV block in all layers
    kv_budget: int  # what the KV pool may take by `memory_utilization`
    vocab_size: int  # rows of the head
    dtype: str
    step_token_limit: int | None = None  # tokens the device computes in 0.5 s, where measured
    choices: dict[str, WorkerChoice] = field(default_factory=dict)  # by kind, where replaced
    phases: dict[str, float] = field(default_factory=dict)  # seconds of each startup phase
    notes: tuple[str, ...] = ()  # lines of the startup report
    graph_bytes: int = 0  # estimate for captured passes
    memory: DeviceMemory | None = None  # how `kv_budget` came about, where device memory decides


@dataclass(frozen=True)
class WarmUp:
    """What was prepared along with the KV pool, for the startup report."""

    phases: dict[str, float] = field(default_factory=dict)  # seconds by name
    num_graphs: int = 0  # captured passes
    graph_bytes: int = 0  # that they took, as measured
    notes: tuple[str, ...] = ()  # what failed, and what that means


class Worker(ABC):
    """One rank: the model runner on a device. Created by the executor where it runs."""

    asynchronous: bool = False  # the device runs beside the host: steps may be launched ahead

    @property
    def forward_version(self) -> int:
        """`CausalLM.forward_version` of its model, once it is loaded. Read from any thread."""
        return 0

    @abstractmethod
    def load(self) -> WorkerReport:
        """Build the model, load weights, profile memory."""

    @abstractmethod
    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        """Make the KV pool, block 0 being the null block, and warm up. None: nothing to report."""

    @abstractmethod
    def forward(self, plan: StepPlan) -> None:
        """Apply the plan to the mirror and launch the forward pass."""

    @abstractmethod
    def sample(self, masks: LogitMasks | None) -> StepResult:
        """Sample the rows of the last `forward`; the tokens stay where the next one needs them."""

    def launch(self, masks: LogitMasks | None) -> Callable[[], StepResult]:
        """As `sample`, without waiting for the device: the returned function waits. It is called
        once, in the order of the steps, on the worker's thread, maybe after the next `forward`,
        which finds the tokens on the device. Default: samples at once."""
        result = self.sample(masks)
        return lambda: result

    def close(self) -> None:  # noqa: B027
        """Free the device."""


@dataclass(frozen=True)
class ExecutorContext:
    """What a factory gets."""

    make_worker: Callable[[int, int], Worker]  # (rank, world) -> a worker in the calling process
    engine_config: dict[str, Any]  # resolved, as plain data, for workers in other processes
    model_config: dict[str, Any] = field(default_factory=dict)  # config.json; empty: no model
    # The engine's, in seconds; a `VirtualClock` moves only when the executor advances it.
    clock: Callable[[], float] = time.monotonic


class Executor(ABC):
    """Executes plans. `max_in_flight` is known when `start` has returned."""

    # Plans that may be submitted before the first is collected. 1: synchronous; with more the
    # engine plans step N + 1 while step N runs.
    max_in_flight: int = 1
    computes: bool = True  # False: tokens are made up, for simulation

    @property
    def forward_version(self) -> int:
        """`Worker.forward_version`, read before every plan: once it changes, sequences admitted
        find no KV of earlier passes in the prefix cache. 0: the model never changes."""
        return 0

    @abstractmethod
    def start(self) -> WorkerReport:
        """Build and load the workers."""

    @abstractmethod
    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        """See `Worker.allocate_kv`; with several workers, what holds for each of them."""

    @abstractmethod
    def submit(self, plan: StepPlan) -> Ticket:
        """Start the forward pass of a plan."""

    @abstractmethod
    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        """Let the submitted step sample. Called once per ticket, in order."""

    @abstractmethod
    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the result of a step. Called once per ticket, in order."""

    def close(self) -> None:  # noqa: B027
        """Stop the workers. Called once; after an error too."""


class Spec:
    @hookspec
    def octavo_executors(self) -> list[Provider[Executor]]:  # type: ignore[empty-body]
        """Providers of executors.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ExecutorContext`.
        """


KIND = Kind("executor", Spec, Executor, ExecutorContext, "executor.kind", "1.3")
