"""Preemption policy `recompute`: drop the victim's KV and compute it again later."""

from __future__ import annotations

from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    PreemptionPolicyContext,
    Victim,
)
from octavo.core.contracts.provider import NoOptions


class RecomputePolicy(PreemptionPolicy):
    """Always recompute."""

    def __init__(self, options: NoOptions, context: PreemptionPolicyContext) -> None:
        pass

    def decide(self, victim: Victim) -> PreemptionAction:
        return PreemptionAction.RECOMPUTE
