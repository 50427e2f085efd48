"""What a step costs, measured while serving: a base and a price of a prefill token.

    seconds(step) = base + prefill tokens * price

base: smoothed time of steps that only decode, which holds the weights' read and the decodes
themselves. price: smoothed `(time - base) / prefill tokens` of the others. The time of a step is
what passes between two plans, as long as work goes on without a pause.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest measurement."""


class StepTimeEstimate:
    """Seconds. Until something was measured, base and price are None."""

    def __init__(self) -> None:
        self.base: float | None = None
        self.price: float | None = None

    def measured(self, seconds: float, num_prefill: int) -> None:
        """A step with `num_prefill` prefill tokens took this long."""
        if num_prefill == 0:
            self.base = _smoothed(self.base, seconds)
        else:
            extra = max(0.0, seconds - (self.base or 0.0))
            self.price = _smoothed(self.price, extra / num_prefill)

    def prefill_tokens(self, seconds: float) -> int | None:
        """Prefill tokens that a step of this length has room for; None: not known yet."""
        if self.price is None:
            return None
        room = seconds - (self.base or 0.0)
        if room <= 0:
            return 0
        return int(min(room / self.price, 2**31)) if self.price > 0 else 2**31


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
