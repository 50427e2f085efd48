"""What was preempted and brought back for a step."""

from __future__ import annotations

from typing import NamedTuple

from octavo.core.contracts.observer import PreemptionRecord


class PreemptionLog(NamedTuple):
    """What happened since the last plan: sequences that gave way, handles that were swapped in."""

    records: tuple[PreemptionRecord, ...] = ()
    swapped_in: tuple[int, ...] = ()
