"""An observer that keeps what it sees, for assertions about steps and requests."""

from __future__ import annotations

from octavo.core.contracts.observer import Observer, RequestRecord, StepRecord


class StepLog(Observer):
    """steps, requests: every record since the start, in order."""

    name = "step_log"

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def on_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def on_request(self, record: RequestRecord) -> None:
        self.requests.append(record)

    @property
    def num_preemptions(self) -> int:
        """Preemptions of all steps."""
        return sum(len(step.preemptions) for step in self.steps)
