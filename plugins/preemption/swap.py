"""Preemption policy `swap`: move the victim's KV to the host, and bring it back later."""

from __future__ import annotations

from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    PreemptionPolicyContext,
    Victim,
)
from octavo.core.contracts.provider import NoOptions


class SwapPolicy(PreemptionPolicy):
    """Always swap. The core falls back to recompute where the host pool has no room."""

    swaps = True

    def __init__(self, options: NoOptions, context: PreemptionPolicyContext) -> None:
        pass

    def decide(self, victim: Victim) -> PreemptionAction:
        return PreemptionAction.SWAP
