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

from octavo.core.contracts.model import KVSpec
from octavo.core.contracts.provider import Provider, hookspec
from octavo.core.messages import LogitMasks, StepPlan, StepResult

Ticket = NewType("Ticket", int)


@dataclass(frozen=True)
class WorkerChoice:
    """An implementation in place of one that could not be made. reason: why it. distribution: whose
    it is. refused: (name, why not) of those that were tried before."""

    name: str
    reason: str
    distribution: str = ""
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """Where a device's memory goes before the KV pool, in bytes. total: all there is, of which
    `utilization` may be used. activations: peak of a step beside weights and KV. graphs: what
    captured passes will take, as estimated. buffers: what the worker keeps beside weights. other:
    held by other processes and the driver. tables: what logits processors may come to keep."""

    total: int
    utilization: float
    weights: int
    activations: int
    graphs: int = 0
    buffers: int = 0
    other: int = 0
    tables: int = 0

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
    """What is known once the model is loaded and profiled.

    kv_specs: one a layer. block_bytes: bytes of one KV block in all layers. kv_budget: bytes that
    the KV pool may take by `memory_utilization`. activation_bytes: peak beside weights and KV.
    graph_bytes: what captured passes will take, as estimated. memory: how `kv_budget` came about,
    None where it is not the device's memory that decides.
    choices: by plugin kind, where the worker uses another than was chosen. phases: seconds of each
    start phase. vocab_size: rows of the head. notes: lines for the startup report.
    step_token_limit: tokens that the device computes in half a second, where that was measured.
    """

    kv_specs: tuple[KVSpec, ...]
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    block_bytes: int
    kv_budget: int
    vocab_size: int
    dtype: str
    step_token_limit: int | None = None
    choices: dict[str, WorkerChoice] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    graph_bytes: int = 0
    memory: DeviceMemory | None = None


@dataclass(frozen=True)
class WarmUp:
    """What was made ready with the KV pool, for the startup report. phases: seconds by name.
    num_graphs, graph_bytes: passes that were captured, and the bytes that they took, as measured.
    notes: lines about what did not work and what that means."""

    phases: dict[str, float] = field(default_factory=dict)
    num_graphs: int = 0
    graph_bytes: int = 0
    notes: tuple[str, ...] = ()


class Worker(ABC):
    """One rank's part: the model runner on a device. Built by the executor where it shall run.

    asynchronous: the device runs beside the host, so that it pays to launch a step before the one
    before it has its result.
    """

    asynchronous: bool = False

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
        """As `sample`, without waiting for the device: the function waits. The next `forward` may
        come before it is called, and finds the tokens on the device; call it once, in the order of
        the steps, on the worker's thread. Default: samples at once."""
        result = self.sample(masks)
        return lambda: result

    def close(self) -> None:  # noqa: B027
        """Free the device."""


@dataclass(frozen=True)
class ExecutorContext:
    """make_worker: builds rank's worker of `world` in the calling process. engine_config: the
    resolved configuration as plain data, for executors that build workers in other processes.
    model_config: the model's config.json, empty when there is no model. clock: the engine's, in
    seconds; a `VirtualClock` moves only when the executor advances it."""

    make_worker: Callable[[int, int], Worker]
    engine_config: dict[str, Any]
    model_config: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic


class Executor(ABC):
    """max_in_flight: how many plans may be submitted before the first must be collected. 1 means
    synchronous; with more the engine plans step N + 1 while step N runs. Known when `start` has
    returned. computes: False for one whose tokens are made up, for simulation."""

    max_in_flight: int = 1
    computes: bool = True

    @property
    def forward_version(self) -> int:
        """`Worker.forward_version`, read before every plan: when it differs from what it was,
        sequences that are admitted from then on find no KV of earlier passes in the prefix cache.
        0 where workers are not at hand, whose model then must not change."""
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
        """Let the submitted step sample. Called once a ticket, in order. The masks are made while
        the forward pass runs."""

    @abstractmethod
    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for the result of a step. Called once a ticket, in order."""

    def close(self) -> None:  # noqa: B027
        """Stop the workers. Called once; after an error too."""


class Spec:
    @hookspec
    def octavo_executors(self) -> list[Provider[Executor]]:  # type: ignore[empty-body]
        """Providers of executors.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ExecutorContext`.
        """
