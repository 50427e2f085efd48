"""State of the sequences that hold a slot: a struct of arrays, and one object each for the rest.

Legend: S slots, L longest sequence in tokens, B rows of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.scheduler_policy import RunningView, WaitingRequest
from octavo.core.messages import EngineRequest

Index = slice | NDArray[np.intp]


_IDLE_USERS = 1024
"""Users without a slot whose numbers are kept, so that memory does not grow with all ever seen."""


class Phase:
    """What a slot's sequence does next. ENDING: it has been planned to its last token and leaves
    when that is committed (or it was aborted while a step is in flight). Plain numbers: NumPy
    compares a column with an enumeration's member four times as slowly."""

    FREE: Final = 0
    PREFILL: Final = 1
    DECODE: Final = 2
    ENDING: Final = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence from arrival to end. `known`: its tokens while it has no slot (int32).
    `swapped`: the KV cache manager's handle on its content in the host pool. Times are seconds on
    the engine's clock. `lost_to`: handle of the sequence that it last gave way to, and what that
    lacked, `seat` or `blocks`."""

    request: EngineRequest
    waiting: WaitingRequest
    known: NDArray[np.int32]
    digest: Any
    max_total: int
    arrival: float
    slot: int = -1
    admitted_at: float | None = None
    first_token_at: float | None = None
    num_output: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    swapped: Any = None
    children: list[Sequence] = field(default_factory=list)
    lost_to: tuple[int, str] | None = None

    @property
    def handle(self) -> int:
        return self.request.handle

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)


class SlotTable:
    """Columns indexed by slot. `num_tokens` counts known tokens, those sampled by a step in flight
    included; `num_computed` tokens whose KV is computed or planned. A row decodes when they differ
    by one. `departures` counts sequences that left their slot, since start."""

    def __init__(self, num_slots: int, max_model_len: int) -> None:
        self.num_slots = num_slots
        self.phase = np.zeros(num_slots, np.int8)
        self.handle = np.full(num_slots, -1, np.int64)
        self.num_tokens = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.max_total = np.zeros(num_slots, np.int64)
        self.priority = np.zeros(num_slots, np.int64)
        self.arrival = np.zeros(num_slots, np.float64)
        self.user = np.zeros(num_slots, np.int64)
        self.sequences: list[Sequence | None] = [None] * num_slots
        # Untouched pages of this table take no memory. The row length is odd: rows a power of two
        # apart would share cache sets.
        self.row = (max_model_len + 1) | 1
        self._flat = np.empty(num_slots * self.row, np.int32)
        self.tokens = self._flat.reshape(num_slots, self.row)
        self._base = np.arange(num_slots, dtype=np.int64) * self.row
        self._free = list(range(num_slots))
        self.departures = 0
        self.users: dict[str | None, int] = {None: 0}
        self.user_names: list[str | None] = [None]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """The lowest free slot, so that the slots in use stay contiguous where possible."""
        return heapq.heappop(self._free)

    def give_back(self, slot: int) -> None:
        """The slot may be used again."""
        self.phase[slot] = Phase.FREE
        self.handle[slot] = -1
        heapq.heappush(self._free, slot)

    def seat(self, slot: int, sequence: Sequence, num_computed: int) -> None:
        """Fill the columns for a sequence whose first `num_computed` tokens are cached."""
        count = len(sequence.known)
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.tokens[slot, :count] = sequence.known
        self.handle[slot] = sequence.handle
        self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = sequence.num_prompt
        self.max_total[slot] = sequence.max_total
        self.priority[slot] = sequence.request.priority
        self.arrival[slot] = sequence.arrival
        self.user[slot] = self._user_number(sequence.request.user)

    def unseat(self, slot: int) -> Sequence:
        """Take the sequence off its slot; the slot stays taken until `give_back`."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        self.sequences[slot] = None
        self.handle[slot] = -1
        self.phase[slot] = Phase.ENDING
        self.departures += 1
        sequence.slot = -1
        return sequence

    def is_complete(self, slot: int) -> bool:
        """Whether the slot decodes and has as many tokens as it may get."""
        full = self.num_tokens[slot] >= self.max_total[slot]
        return bool(full and self.phase[slot] == Phase.DECODE)

    def put_tokens(
        self, slots: NDArray[np.intp], positions: NDArray[np.int64], token_ids: NDArray[np.int32]
    ) -> None:
        """tokens[slots[i], positions[i]] = token_ids[i]."""
        self._flat[self._base[slots] + positions] = token_ids

    def view(self, slots: NDArray[np.intp], now: float) -> RunningView:
        """Read-only columns of these slots for a policy."""
        arrival = self.arrival[slots]
        slots.setflags(write=False)
        arrival.setflags(write=False)

        def column(values: NDArray[np.int64]) -> NDArray[np.int64]:
            picked = values[slots]
            picked.setflags(write=False)
            return picked

        return RunningView(
            slots=slots,
            handles=column(self.handle),
            num_tokens=column(self.num_tokens),
            num_computed=column(self.num_computed),
            num_prompt=column(self.num_prompt),
            priority=column(self.priority),
            arrival=arrival,
            user=column(self.user),
            user_names=self.user_names,
            now=now,
        )

    def _user_number(self, user: str | None) -> int:
        if user not in self.users and len(self.user_names) > 2 * self.num_slots + _IDLE_USERS:
            self._forget_idle_users()
        number = self.users.get(user)
        if number is None:
            number = self.users[user] = len(self.user_names)
            self.user_names.append(user)
        return number

    def _forget_idle_users(self) -> None:
        """Number anew the users who have a slot."""
        self.users, self.user_names = {None: 0}, [None]
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                self.user[slot] = self._user_number(sequence.request.user)


class RowSet:
    """An ordered set of slots whose members change rarely. `index` is a slice where the slots are
    contiguous and ascending, so that columns are read as views."""

    def __init__(self) -> None:
        self.slots: NDArray[np.intp] = np.empty(0, np.intp)
        self.index: Index = slice(0, 0)
        self.version = 0

    def __len__(self) -> int:
        return len(self.slots)

    def replace(self, slots: NDArray[np.intp]) -> None:
        """New members, in order."""
        self.slots = slots
        self.version += 1
        count = len(slots)
        self.index = slots
        if count and slots[-1] - slots[0] == count - 1 and (np.diff(slots) == 1).all():
            self.index = slice(int(slots[0]), int(slots[0]) + count)

    def append(self, slots: Seq[int] | NDArray[np.intp]) -> None:
        self.replace(np.concatenate([self.slots, np.asarray(slots, np.intp)]))

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the members whose mask is False."""
        self.replace(self.slots[mask])


_FEW = 4
"""Stop tokens up to which comparing with each is faster than looking each token up."""


class StopTokens:
    """Which token ids may end some running sequence, and how many asked for each."""

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

    def rows(self, tokens: NDArray[np.int32]) -> list[int]:
        """Indices of the tokens that may end a sequence."""
        if len(self._counts) > _FEW:
            return self._mask[tokens].nonzero()[0].tolist()
        found = [(tokens == token).nonzero()[0] for token in self._counts]
        return [row for rows in found for row in rows.tolist()]
