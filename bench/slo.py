"""What a request must keep to count as good."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count for goodput, in seconds; None: anything. ttft: time to
    first token. itl: mean time between its tokens. e2e: arrival to end."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    def met(self, ttft: float, itl: float, e2e: float) -> bool:
        """Whether a request with these times is good."""
        pairs = ((self.ttft, ttft), (self.itl, itl), (self.e2e, e2e))
        return all(limit is None or value <= limit for limit, value in pairs)

    def __bool__(self) -> bool:
        """Whether there is any target."""
        return (self.ttft, self.itl, self.e2e) != (None, None, None)
