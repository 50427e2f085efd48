"""Scheduler policy `fcfs`: first come, first served; the latest arrival gives way first."""

from __future__ import annotations

from octavo.core.contracts.provider import NoOptions
from octavo.core.contracts.scheduler_policy import SchedulerPolicyContext, WaitingRequest
from octavo.plugins.scheduler_policies.queue import QueuePolicy


class FcfsPolicy(QueuePolicy):
    """By arrival, so that a preempted request returns to the place that it had."""

    def __init__(self, options: NoOptions, context: SchedulerPolicyContext) -> None:
        super().__init__()

    def key(self, request: WaitingRequest) -> float:
        return request.arrival
