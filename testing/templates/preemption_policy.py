"""Preemption policy `example`: long sequences are swapped, short ones are computed again."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    PreemptionPolicyContext,
    Victim,
)


class ExampleOptions(Options):
    """Where short ends."""

    swap_from_tokens: int = Field(
        default=512, ge=0, description="Sequences with this many computed tokens are swapped."
    )


class ExamplePreemption(PreemptionPolicy):
    """Decides by length alone."""

    swaps = True

    def __init__(self, options: ExampleOptions, context: PreemptionPolicyContext) -> None:
        self._least = options.swap_from_tokens
        self._reason = ""

    def decide(self, victim: Victim) -> PreemptionAction:
        swap = victim.num_computed >= self._least
        relation = "at least" if swap else "fewer than"
        self._reason = f"{victim.num_computed} tokens, {relation} {self._least}"
        return PreemptionAction.SWAP if swap else PreemptionAction.RECOMPUTE

    def reason(self) -> str:
        return self._reason
