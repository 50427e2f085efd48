"""Where the time of a step goes: seconds by phase, for the last steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.core.messages import StepResult

PHASES = ("schedule", "prepare", "forward", "sample", "commit")
_KEPT = 16384


class StepTiming:
    """A ring of the last 16384 steps, [phase] seconds each."""

    def __init__(self) -> None:
        self._ring = np.zeros((_KEPT, len(PHASES)))
        self._total = np.zeros(len(PHASES))
        self.num_steps = 0

    def record(self, schedule_s: float, result: StepResult, commit_s: float) -> None:
        """One step. Seconds; the result has those of the phases in between."""
        row = self._ring[self.num_steps % _KEPT]
        row[:] = schedule_s, result.prepare_s, result.forward_s, result.sample_s, commit_s
        self._total += row
        self.num_steps += 1

    def reset(self) -> None:
        """Forget everything, after a warm-up."""
        self._total[:] = 0
        self.num_steps = 0

    def summary(self) -> dict[str, Any]:
        """By phase: `median_ms`, `mean_ms`, `p99_ms` of the last steps, and `share` of the time of
        all steps; and `num_steps`."""
        kept = self._ring[: min(self.num_steps, _KEPT)] * 1e3
        everything = float(self._total.sum()) or 1.0
        phases = {}
        for column, name in enumerate(PHASES):
            values = kept[:, column] if len(kept) else np.zeros(1)
            phases[name] = {
                "median_ms": float(np.median(values)),
                "mean_ms": float(values.mean()),
                "p99_ms": float(np.percentile(values, 99)),
                "share": float(self._total[column]) / everything,
            }
        return {"num_steps": self.num_steps, "phases": phases}
