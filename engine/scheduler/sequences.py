"""All sequences that have not ended yet: how they are queued, and how they end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.messages import EngineRequest, Finish
from octavo.engine.scheduler.kv_cache import KVCache
from octavo.engine.scheduler.preemption import Preemption
from octavo.engine.scheduler.state import SequenceState, SlotTable

_FEW = 4
"""Stop tokens up to which comparing with each is faster than looking each token up."""


class StopTokens:
    """Token ids that may end some live sequence, and for how many each may."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.zeros(vocab_size, np.bool_)
        self._counts: dict[int, int] = {}

    def _ids(self, request: EngineRequest) -> set[int]:
        ids = set(request.sampling.stop_token_ids or ())
        if not request.sampling.ignore_eos:
            ids.update(request.eos_token_ids)
        return {token for token in ids if 0 <= token < len(self._mask)}

    def add(self, request: EngineRequest) -> None:
        for token in self._ids(request):
            self._counts[token] = self._counts.get(token, 0) + 1
            self._mask[token] = True

    def remove(self, request: EngineRequest) -> None:
        for token in self._ids(request):
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
                self._mask[token] = False

    def find(self, tokens: NDArray[np.int32]) -> list[int]:
        """Indices of the tokens that may end a sequence."""
        if len(self._counts) > _FEW:
            return self._mask[tokens].nonzero()[0].tolist()
        found = [(tokens == token).nonzero()[0] for token in self._counts]
        return [row for rows in found for row in rows.tolist()]


class LiveSequences:
    """Sequences by handle, from arrival to end."""

    def __init__(
        self,
        slots: SlotTable,
        cache: KVCache,
        policy: SchedulerPolicy,
        preemption: Preemption,
        vocab_size: int,
    ) -> None:
        self._slots, self._cache, self._policy = slots, cache, policy
        self._preemption = preemption
        self._finished: list[Finish] = []
        self.by_handle: dict[int, SequenceState] = {}
        self.stops = StopTokens(vocab_size)
        self.on_finished: Callable[[SequenceState, str], None] | None = None
        """Called with each sequence that ends, and its finish reason."""

    def add(self, sequence: SequenceState) -> None:
        """Take in a new sequence. It is queued, at once or when the prompt that it shares with its
        parent is computed."""
        request = sequence.request
        self.by_handle[request.handle] = sequence
        self.stops.add(request)
        parent = self.by_handle.get(request.parent) if request.parent is not None else None
        if parent is not None and parent.first_token_at is None:
            parent.children.append(sequence)
        else:
            self.queue(sequence)

    def queue(self, sequence: SequenceState) -> None:
        """Hand a sequence without a slot to the policy."""
        sequence.waiting.num_cached = self._cache.match(sequence).num_tokens
        self._policy.add(sequence.waiting)

    def queue_children(self, sequence: SequenceState) -> None:
        """Queue the choices that share this one's prompt: it is computed, or never will be."""
        for child in sequence.children:
            if child.handle in self.by_handle:
                self.queue(child)
        sequence.children = []

    def finish(self, sequence: SequenceState, finish: Finish) -> None:
        """End a sequence. Its slot is vacated, if it has one."""
        finish.num_preemptions = sequence.num_preemptions
        del self.by_handle[sequence.handle]
        self.stops.remove(sequence.request)
        self.queue_children(sequence)
        slot = sequence.slot
        if slot >= 0:
            sequence.num_output = int(self._slots.num_tokens[slot]) - sequence.num_prompt
            self._slots.vacate(slot)
        else:
            sequence.num_output = len(sequence.known) - sequence.num_prompt
            self._policy.remove(sequence.handle)
            self._preemption.drop_swapped(sequence)
        self._finished.append(finish)
        if self.on_finished is not None:
            self.on_finished(sequence, finish.reason)

    def refuse(self, finish: Finish) -> None:
        """End a request that was never added."""
        self._finished.append(finish)

    @property
    def any_finished(self) -> bool:
        return bool(self._finished)

    def take_finished(self) -> list[Finish]:
        """Sequences that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished
