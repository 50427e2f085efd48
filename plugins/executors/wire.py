"""Executor `wire`: as `local`, but nothing reaches the worker, or comes back, other than as bytes.

It keeps plans and results honest: they must hold all that a worker in another process needs.
"""

from __future__ import annotations

from octavo.core.contracts.executor import Ticket
from octavo.core.messages import LogitMasks, StepPlan, StepResult
from octavo.kernels import Codec
from octavo.plugins.executors.local import LocalExecutor

_PLANS, _MASKS, _RESULTS = Codec(StepPlan), Codec(LogitMasks), Codec(StepResult)


class WireExecutor(LocalExecutor):
    """Encodes and decodes every message."""

    def submit(self, plan: StepPlan) -> Ticket:
        return super().submit(_PLANS.decode(_PLANS.encode(plan)))

    def sample(self, ticket: Ticket, masks: LogitMasks | None) -> None:
        if masks is not None:
            masks = _MASKS.decode(_MASKS.encode(masks))
        super().sample(ticket, masks)

    def collect(self, ticket: Ticket) -> StepResult:
        return _RESULTS.decode(_RESULTS.encode(super().collect(ticket)))
