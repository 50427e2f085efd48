"""Executor `local`: one worker, called in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    Ticket,
    WarmUp,
    WorkerReport,
)
from octavo.core.messages import LogitMasks, StepPlan, StepResult


class LocalOptions(Options):
    """How far the host runs ahead."""

    max_in_flight: Literal["auto", 1, 2] = Field(
        default="auto",
        description="Steps that may be launched before the first is collected. With 2 the host "
        "plans and launches a step while the one before it runs, and sampled tokens reach it on "
        "the device; `auto`: 2 where the device runs beside the host (CUDA), else 1.",
    )


class LocalExecutor(Executor):
    """A submitted plan is launched when `submit` returns; `collect` waits for it."""

    max_in_flight = 1

    def __init__(self, options: LocalOptions, context: ExecutorContext) -> None:
        self._options = options
        self._worker = context.make_worker(0, 1)
        self._tickets = 0
        self._results: dict[Ticket, Callable[[], StepResult]] = {}

    @property
    def forward_version(self) -> int:
        return self._worker.forward_version

    def start(self) -> WorkerReport:
        report = self._worker.load()
        wanted = self._options.max_in_flight
        self.max_in_flight = (2 if self._worker.asynchronous else 1) if wanted == "auto" else wanted
        return report

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self._worker.allocate_kv(num_blocks, num_host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        self._worker.forward(plan)
        self._tickets += 1
        return Ticket(self._tickets)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        self._results[ticket] = self._worker.launch(masks)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)()

    def close(self) -> None:
        self._worker.close()
