"""What every step of a run computed, and how long it took: what a cost model is fitted to."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.core.contracts.executor import Executor, Ticket, WarmUp, WorkerReport
from octavo.core.messages import LogitMasks, StepPlan, StepResult
from octavo.plugins.executors.cost_model import StepShape, StepTracker, step_records


class StepRecorder(Executor):
    """Stands between an engine and its executor. A step's seconds run from the end of the step
    before it (for the first: from its submission), so that they add up to the whole run with
    scheduling included. Begin when nothing is running."""

    def __init__(
        self,
        executor: Executor,
        num_slots: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.executor, self.max_in_flight = executor, executor.max_in_flight
        self._tracker = StepTracker(num_slots)
        self._clock = clock
        self._last: float | None = None
        self._shapes: list[StepShape] = []
        self._seconds: list[float] = []

    def start(self) -> WorkerReport:
        return self.executor.start()

    def allocate_kv(self, num_blocks: int, num_host_blocks: int = 0) -> WarmUp | None:
        return self.executor.allocate_kv(num_blocks, num_host_blocks)

    def submit(self, plan: StepPlan) -> Ticket:
        if self._last is None:
            self._last = self._clock()
        self._shapes.append(self._tracker.follow(plan))
        return self.executor.submit(plan)

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        self.executor.sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        result = self.executor.collect(ticket)
        now = self._clock()
        assert self._last is not None, "a step was collected before any was submitted"
        self._seconds.append(now - self._last)
        self._last = now
        return result

    def close(self) -> None:
        self.executor.close()

    def records(self) -> dict[str, list[float]]:
        """One column a figure, one entry a step, see `step_records`."""
        return step_records(self._shapes, self._seconds)
