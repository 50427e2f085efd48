"""How a slot becomes free."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.core.contracts.kv_cache_manager import KVCacheManager
from octavo.engine.scheduler.state import SlotTable
from octavo.engine.scheduler.step import PendingStep


class SlotReleaser:
    """Frees slots and their blocks. There is no other way, whyever a sequence leaves.

    While steps are in flight, a slot is freed when the newest of them is committed: until then it
    may still write into the slot's blocks.
    """

    def __init__(
        self, slots: SlotTable, manager: KVCacheManager, in_flight: deque[PendingStep]
    ) -> None:
        self._slots, self._manager, self._in_flight = slots, manager, in_flight
        self._freed: list[int] = []

    def release_vacated(self) -> None:
        """Free the slots that were vacated, now or when the newest step in flight is committed."""
        vacated = self._slots.drop_vacated()
        if not vacated:
            return
        if self._in_flight:
            self._in_flight[-1].deferred.extend(vacated)
        else:
            self.free(vacated)

    def free(self, slots: Sequence[int]) -> None:
        """Free these vacated slots: no step in flight uses them."""
        for slot in slots:
            self._manager.release(slot)
            self._slots.free(slot)
        self._freed.extend(slots)

    def take_freed(self) -> list[int]:
        """Slots that became free since the last call."""
        freed, self._freed = self._freed, []
        return freed
