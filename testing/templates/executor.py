"""Executor `example`: one worker in the engine's thread, which runs a step when it is collected."""

from __future__ import annotations

from octavo.core.contracts import Options
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    Ticket,
    WarmUp,
    WorkerReport,
)
from octavo.core.messages import LogitMasks, StepPlan, StepResult


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleExecutor(Executor):
    """Two plans may be outstanding, so that the engine plans ahead."""

    max_in_flight = 2

    def __init__(self, options: ExampleOptions, context: ExecutorContext) -> None:
        self._worker = context.make_worker(0, 1)
        self._plans: dict[int, StepPlan] = {}
        self._masks: dict[int, LogitMasks | None] = {}

    def start(self) -> WorkerReport:
        return self._worker.load()

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self._worker.allocate_kv(num_blocks, num_host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        self._plans[plan.step] = plan
        return Ticket(plan.step)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        self._masks[ticket] = masks

    def collect(self, ticket: Ticket) -> StepResult:
        self._worker.forward(self._plans.pop(ticket))
        return self._worker.sample(self._masks.pop(ticket))

    def close(self) -> None:
        self._worker.close()
