"""The scheduler's side of the KV cache manager."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import (
    NO_MATCH,
    BlockCopy,
    CopyKind,
    KVCacheManager,
    KVStats,
    Match,
    SwapOut,
)
from octavo.core.messages import EngineRequest
from octavo.engine.scheduler.state import SequenceState

_NO_COPIES = np.empty((5, 0), np.int32)
_PREFIX_COUNTS = ("prefix_queries", "prefix_hits", "host_cache_queries", "host_cache_hits")


class KVCache:
    """Calls the manager, and keeps what the scheduler adds to it.

    Copies that the manager asks for are collected, in the order in which they must run, until the
    next plan takes them. Prefix cache statistics leave out admissions after a preemption: a
    sequence that finds its own prefix again says nothing about the traffic.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self._extends_copy = type(manager).take_copies is not KVCacheManager.take_copies
        self._copies: list[BlockCopy] = []
        self._readmissions = dict.fromkeys(_PREFIX_COUNTS, 0)
        self._forward_key: list[bytes] = []

    # ---- prefixes -----------------------------------------------------------------------------

    def digest(self, request: EngineRequest, token_ids: NDArray[np.int32]) -> Any:
        """The manager's digest of these tokens of a request."""
        return self.manager.digest(token_ids, [*request.extra_keys, *self._forward_key])

    def match(self, sequence: SequenceState) -> Match:
        """The leading tokens of a waiting sequence that the prefix cache holds."""
        if sequence.swapped is not None:
            return NO_MATCH  # it brings its own KV
        # Prompt logprobs need the logits of every prompt token: nothing may be skipped.
        if sequence.request.sampling.prompt_logprobs is not None:
            return NO_MATCH
        return self.manager.lookup(sequence.digest, sequence.known)

    def set_forward_version(self, version: int) -> None:
        """Digests made from now on do not match KV that another version of the model's forward pass
        computed."""
        self._forward_key = [b"forward:%d" % version]

    # ---- blocks -------------------------------------------------------------------------------

    def admit(self, sequence: SequenceState, slot: int, match: Match, total: int) -> bool:
        """Give a slot the matched blocks, and room for `total` tokens. False: blocks are short."""
        before = self._counts(sequence)
        copies = self.manager.admit(slot, sequence.digest, match, total)
        return self._admitted(copies, before)

    def fork(self, sequence: SequenceState, parent: int, slot: int, total: int) -> bool:
        """Let a slot share the first `total` tokens of slot `parent`. False: blocks are short."""
        before = self._counts(sequence)
        copies = self.manager.fork(parent, slot, total)
        return self._admitted(copies, before)

    def _counts(self, sequence: SequenceState) -> KVStats | None:
        return self.manager.stats() if sequence.admitted_at is not None else None

    def _admitted(self, copies: Iterable[BlockCopy] | None, before: KVStats | None) -> bool:
        if before is not None:
            after = self.manager.stats()
            for name in _PREFIX_COUNTS:
                self._readmissions[name] += getattr(after, name) - getattr(before, name)
        return self._add_copies(copies)

    def _add_copies(self, copies: Iterable[BlockCopy] | None) -> bool:
        if copies is None:
            return False
        self._copies.extend(copies)
        return True

    def extend(self, slots: NDArray[np.intp], totals: NDArray[np.int64]) -> int:
        """Make room for `totals[i]` tokens in `slots[i]`; how many of the slots got it."""
        fitting = self.manager.extend(slots, totals)
        if self._extends_copy:
            self._copies.extend(self.manager.take_copies())
        return fitting

    def swap_out(self, slot: int, num_tokens: int) -> SwapOut | None:
        """Move a slot's KV to the host pool. None: there is no room."""
        swapped = self.manager.swap_out(slot, num_tokens)
        if swapped is not None:
            self._copies.extend(swapped.copies)
        return swapped

    def swap_in(self, slot: int, handle: Any, total: int) -> bool:
        """Bring KV back from the host pool, with room for `total` tokens. False: blocks are
        short."""
        return self._add_copies(self.manager.swap_in(slot, handle, total))

    def num_available(self) -> int:
        """Blocks that are free or can be evicted."""
        stats = self.manager.stats()
        return stats.num_free + stats.num_evictable

    def take_copies(self) -> tuple[NDArray[np.int32], int]:
        """All copies since the last call, int32[5, n] as in a plan, and how many of them go to or
        come from the host."""
        if not self._copies:
            return _NO_COPIES, 0
        rows = [(c.kind, c.group, c.source, c.target, c.num_tokens) for c in self._copies]
        self._copies = []
        table = np.asarray(rows, np.int32).T
        return table, int(np.count_nonzero(table[0] != CopyKind.DEVICE))

    def stats(self) -> KVStats:
        """The manager's, with queries and hits of first admissions only."""
        stats = self.manager.stats()
        if not self._readmissions["prefix_queries"]:
            return stats
        counts = {name: getattr(stats, name) - n for name, n in self._readmissions.items()}
        return replace(stats, **counts)
