"""Executor `local`: one worker, called in the engine's thread."""

from __future__ import annotations

from octavo.core.contracts import NoOptions
from octavo.core.contracts.executor import (
    Executor,
    ExecutorContext,
    Ticket,
    WarmUp,
    WorkerReport,
)
from octavo.core.messages import LogitMasks, StepPlan, StepResult


class LocalExecutor(Executor):
    """Synchronous: a submitted plan has run when `submit` returns."""

    max_in_flight = 1

    def __init__(self, options: NoOptions, context: ExecutorContext) -> None:
        self._worker = context.make_worker(0, 1)
        self._tickets = 0
        self._results: dict[Ticket, StepResult] = {}

    def start(self) -> WorkerReport:
        return self._worker.load()

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self._worker.allocate_kv(num_blocks, num_host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        self._worker.forward(plan)
        self._tickets += 1
        return Ticket(self._tickets)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        self._results[ticket] = self._worker.sample(masks)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._results.pop(ticket)

    def close(self) -> None:
        self._worker.close()
