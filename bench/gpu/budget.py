"""Parts within a time limit: one after another while there is time, whatever becomes of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.gpu.parts import Part
from octavo.core.errors import OctavoError

RESERVE_S = 3.0
"""Kept for ending processes and printing."""
LEAST_LIMIT_S = 100.0
PATIENCE = 3.0
"""A part may take so many times what it was expected to, and `LEAST_LIMIT_S` in any case: a library
may compile its kernels in it."""


class PartError(OctavoError):
    """A part went wrong; the message says how. It may have given figures before."""


@dataclass
class Outcome:
    """status: `done`, `failed`, `skipped` or `interrupted`. result: nested figures, as far as the
    part came. error: why it came no further."""

    part: Part
    status: str = "skipped"
    seconds: float = 0.0
    error: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    def take(self, value: Any, path: Sequence[str]) -> None:
        """A figure has come."""
        place = self.result
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value

    def as_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "name": self.part.name,
            "kind": self.part.kind,
            "given": self.part.given,
            "status": self.status,
            "seconds": self.seconds,
            "error": self.error,
            "result": self.result,
        }


Perform = Callable[[Part, float, Outcome], None]
"""(part, seconds it may take, where its figures go). Raises `PartError`."""


class Schedule:
    """seconds: for all parts, from the making of this object. clock: in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._ratios: list[float] = []

    def left(self) -> float:
        """Seconds until the parts must have ended."""
        return self._end - RESERVE_S - self._clock()

    def expected(self, part: Part) -> float:
        """Its estimate, by how the last parts that were done compare to theirs."""
        recent = sorted(self._ratios[-3:])
        return part.estimate * (recent[len(recent) // 2] if recent else 1.0)

    def run(
        self,
        parts: Sequence[Part],
        perform: Perform,
        on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    ) -> list[Outcome]:
        """One outcome a part, in order. Ctrl-C ends the part and skips the others."""
        outcomes: list[Outcome] = []
        stopped = False
        for part in parts:
            outcome = Outcome(part)
            outcomes.append(outcome)
            if stopped:
                outcome.error = "interrupted"
            elif self.expected(part) > self.left():
                outcome.error = f"{self.expected(part):.0f} s of {max(0.0, self.left()):.0f} s left"
            else:
                stopped = not self._one(part, perform, outcome)
            on_outcome(outcome)
        return outcomes

    def _one(self, part: Part, perform: Perform, outcome: Outcome) -> bool:
        """Whether to go on."""
        started = self._clock()
        limit = min(self.left(), max(LEAST_LIMIT_S, PATIENCE * self.expected(part)))
        try:
            perform(part, limit, outcome)
            outcome.status = "done"
        except PartError as error:
            outcome.status, outcome.error = "failed", str(error)
        except KeyboardInterrupt:
            outcome.status, outcome.error = "interrupted", "interrupted"
        outcome.seconds = self._clock() - started
        if outcome.status == "done" and part.kind != "facts":
            self._ratios.append(outcome.seconds / part.estimate)
        return outcome.status != "interrupted"
