"""How often the prefix cache helped: lookups of sequences that come back after a preemption are
left out. They find their own prefix again, which says nothing about the traffic (vLLM counts them
apart as well)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from octavo.core.contracts.kv_cache_manager import KVCacheManager, KVStats

NAMES = ("prefix_queries", "prefix_hits", "host_cache_queries", "host_cache_hits")


class PrefixCounts:
    """A manager counts every admission; this one knows which of them are not the first."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._again = dict.fromkeys(NAMES, 0)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What the manager counts in here is not shown by `stats`."""
        before = self._counts(self._kv.stats())
        yield
        for name, count in self._counts(self._kv.stats()).items():
            self._again[name] += count - before[name]

    def stats(self) -> KVStats:
        """The manager's, with queries and hits of first admissions alone."""
        stats = self._kv.stats()
        if not self._again["prefix_queries"]:
            return stats
        shown = {name: n - self._again[name] for name, n in self._counts(stats).items()}
        return replace(stats, **shown)

    @staticmethod
    def _counts(stats: KVStats) -> dict[str, int]:
        return {name: getattr(stats, name) for name in NAMES}
