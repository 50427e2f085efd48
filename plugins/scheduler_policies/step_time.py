"""How long a step takes, measured while serving: a base, and a price for each prefill token.

    seconds(step) = base + prefill tokens * price

base: smoothed time of steps that only decode, which holds the weights' read and the decodes
themselves. price: smoothed `(time - base) / prefill tokens` of the others. The time of a step is
what passes between two plans, as long as work goes on without a pause.
"""

from __future__ import annotations

SMOOTHING = 0.2
"""Weight of the newest measurement."""


class StepTimeModel:
    """Predicts how long a step takes. base and price are seconds, None until measured."""

    def __init__(self) -> None:
        self.base: float | None = None
        self.price: float | None = None

    def add(self, seconds: float, num_prefill: int) -> None:
        """Take in the time of a step with `num_prefill` prefill tokens."""
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
