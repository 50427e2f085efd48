"""A clock that only moves when it is told to: simulations and tests run the code that serves."""

from __future__ import annotations


class VirtualClock:
    """Seconds from 0, or from `start`. Calling it gives the time, as `time.monotonic` does."""

    def __init__(self, start: float = 0.0) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass (at least 0)."""
        assert seconds >= 0, f"time does not run backwards: {seconds} s"
        self.now += seconds

    def advance_to(self, moment: float) -> None:
        """Wait until `moment`; nothing happens when that has passed."""
        self.now = max(self.now, moment)
