"""Preemption policy `cost_model` (what `auto` takes): per victim the cheaper of two measured times.

Let c be the seconds that copying one block between host and device takes, and p the seconds that a
prompt token adds to a step. A victim of n tokens in b blocks costs

    swap       2 b c     its blocks go out and come back
    recompute  n p       its tokens are computed again

and the smaller wins. Both rates are sums of measured seconds over sums of measured work, in which
the past fades: every new measurement weighs 1, and all earlier ones together `fading` times what
they weighed. c comes from steps that copied. p comes from steps with prompt tokens, less what the
last steps without them took when there were decoding rows beside.

While nothing was copied yet, c is unknown: then a victim is swapped, in order to measure. Prefix
reuse, which may make recomputing cheaper, is not foreseen.
"""

from __future__ import annotations

from octavo.core.contracts.preemption_policy import (
    PreemptionAction,
    PreemptionPolicy,
    PreemptionPolicyContext,
    StepCost,
    Victim,
)
from octavo.core.contracts.provider import NoOptions

FADING = 0.95


class Rate:
    """Seconds by unit of work, over measurements that fade."""

    def __init__(self) -> None:
        self._seconds = self._work = 0.0

    def add(self, seconds: float, work: float) -> None:
        """One measurement."""
        self._seconds = FADING * self._seconds + seconds
        self._work = FADING * self._work + work

    @property
    def value(self) -> float | None:
        """None while nothing was measured."""
        return self._seconds / self._work if self._work else None


class CostModelPolicy(PreemptionPolicy):
    """See the module."""

    swaps = True

    def __init__(self, options: NoOptions, context: PreemptionPolicyContext) -> None:
        self._copy, self._prefill, self._decode = Rate(), Rate(), Rate()
        self._reason = ""

    def observe(self, cost: StepCost) -> None:
        if cost.num_copied_blocks:
            self._copy.add(cost.copy_s, cost.num_copied_blocks)
        if not cost.num_prefill:
            self._decode.add(cost.compute_s, 1.0)
            return
        beside = self._decode.value or 0.0 if cost.num_decodes else 0.0
        self._prefill.add(max(cost.compute_s - beside, 0.0), cost.num_prefill)

    def costs(self, victim: Victim) -> tuple[float | None, float | None]:
        """Seconds to swap and to recompute a victim; None where that is not known yet."""
        copy, prefill = self._copy.value, self._prefill.value
        return (
            None if copy is None else 2 * victim.num_blocks * copy,
            None if prefill is None else victim.num_computed * prefill,
        )

    def decide(self, victim: Victim) -> PreemptionAction:
        if victim.host_blocks_free < victim.num_blocks:
            self._reason = (
                f"the host pool has {victim.host_blocks_free} free blocks, "
                f"{victim.num_blocks} are needed"
            )
            return PreemptionAction.RECOMPUTE
        swap, recompute = self.costs(victim)
        if swap is None or recompute is None:
            self._reason = "to measure a copy"
            return PreemptionAction.SWAP
        sign = "<" if swap < recompute else ">="
        self._reason = f"swap {swap * 1e3:.3g} ms {sign} recompute {recompute * 1e3:.3g} ms"
        return PreemptionAction.SWAP if swap < recompute else PreemptionAction.RECOMPUTE

    def reason(self) -> str:
        return self._reason
