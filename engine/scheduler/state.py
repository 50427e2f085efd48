"""State of the sequences: an object for each, and a struct of arrays for those that hold a slot.

Legend: S slots, L longest sequence in tokens, B rows of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
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
    """What a slot's sequence does next. Plain numbers: NumPy compares a column with an
    enumeration's member four times as slowly."""

    FREE: Final = 0
    PREFILL: Final = 1
    DECODE: Final = 2
    ENDING: Final = 3
    """Its last token is planned, or its sequence has left and a step in flight still uses it."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One sequence, from arrival to end. Times are seconds on the engine's clock."""

    request: EngineRequest
    waiting: WaitingRequest
    """What the scheduler policy sees of it while it has no slot."""
    known: NDArray[np.int32]
    """int32[n]: prompt and output so far. Out of date while the sequence has a slot."""
    digest: Any
    """The KV cache manager's digest of `known`."""
    max_total: int
    """Tokens after which it ends, prompt included."""
    arrival: float
    slot: int = -1
    """-1: it waits."""
    admitted_at: float | None = None
    """First admission."""
    first_token_at: float | None = None
    num_output: int = 0
    """Generated tokens, set when it ends."""
    num_cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    num_preemptions: int = 0
    swapped: Any = None
    """The KV cache manager's handle on its KV in the host pool, while it is there."""
    children: list[SequenceState] = field(default_factory=list)
    """Choices of the same request that are queued once this one's prompt is computed."""
    lost_to: tuple[int, str] | None = None
    """Handle of the sequence for which it was last preempted, and what that lacked: `slot` or
    `blocks`."""

    @property
    def handle(self) -> int:
        return self.request.handle

    @property
    def num_prompt(self) -> int:
        return len(self.request.token_ids)


class RowSet:
    """Slots in the order of their rows. Members change rarely."""

    def __init__(self) -> None:
        self.slots: NDArray[np.intp] = np.empty(0, np.intp)
        self.index: Index = slice(0, 0)
        """`slots`, or a slice where they are contiguous and ascending, so that columns are read as
        views."""
        self.version = 0
        """Grows with every change of members."""

    def __len__(self) -> int:
        return len(self.slots)

    def replace(self, slots: NDArray[np.intp]) -> None:
        """Set the members, in order."""
        self.slots = slots
        self.version += 1
        count = len(slots)
        self.index = slots
        if count and slots[-1] - slots[0] == count - 1 and (np.diff(slots) == 1).all():
            self.index = slice(int(slots[0]), int(slots[0]) + count)

    def append(self, slots: Sequence[int] | NDArray[np.intp]) -> None:
        self.replace(np.concatenate([self.slots, np.asarray(slots, np.intp)]))

    def keep(self, mask: NDArray[np.bool_]) -> None:
        """Drop the members whose mask is False."""
        self.replace(self.slots[mask])


class SlotTable:
    """Columns indexed by slot, and which slots run. Nobody else writes them.

    A slot is free, then occupied (it prefills, then decodes), then vacated when its sequence leaves
    it, then free again (see `SlotReleaser`).
    """

    def __init__(self, num_slots: int, max_model_len: int, clock: Callable[[], float]) -> None:
        self.num_slots, self._clock = num_slots, clock
        self.phase = np.zeros(num_slots, np.int8)
        self.handle = np.full(num_slots, -1, np.int64)
        """-1 where no sequence is."""
        self.num_tokens = np.zeros(num_slots, np.int64)
        """Known tokens, including those that a step in flight samples."""
        self.num_computed = np.zeros(num_slots, np.int64)
        """Tokens whose KV is computed or planned. A decoding slot has one less than tokens."""
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.max_total = np.zeros(num_slots, np.int64)
        self.priority = np.zeros(num_slots, np.int64)
        self.arrival = np.zeros(num_slots, np.float64)
        self.user = np.zeros(num_slots, np.int64)
        self.num_sent_blocks = np.zeros(num_slots, np.int32)
        """Blocks of the slot's table that a plan has sent to the worker."""
        self.sequences: list[SequenceState | None] = [None] * num_slots
        self.decoding, self.prefilling = RowSet(), RowSet()
        self.num_vacated = 0
        """Sequences that have left their slot, since start."""
        # Untouched pages of this table take no memory. The row length is odd: rows a power of two
        # apart would share cache sets.
        self.row = (max_model_len + 1) | 1
        self._flat = np.empty(num_slots * self.row, np.int32)
        self.tokens = self._flat.reshape(num_slots, self.row)
        self._base = np.arange(num_slots, dtype=np.int64) * self.row
        self._free = list(range(num_slots))
        self._vacated: list[tuple[int, int]] = []
        self.users: dict[str | None, int] = {None: 0}
        self.user_names: list[str | None] = [None]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def running(self) -> NDArray[np.intp]:
        """All slots that run, decoding ones first."""
        return np.concatenate([self.decoding.slots, self.prefilling.slots])

    @property
    def next_free(self) -> int:
        """The lowest free slot, so that the slots in use stay contiguous where possible."""
        return self._free[0]

    # ---- the life of a slot -------------------------------------------------------------------

    def occupy(self, sequence: SequenceState, num_computed: int, num_blocks: int) -> None:
        """Put a sequence whose first `num_computed` tokens are cached on `next_free`. The plan that
        admits it sends its first `num_blocks` blocks."""
        slot, count = heapq.heappop(self._free), len(sequence.known)
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.tokens[slot, :count] = sequence.known
        self.phase[slot] = Phase.PREFILL
        self.handle[slot] = sequence.handle
        self.num_tokens[slot] = count
        self.num_computed[slot] = num_computed
        self.num_prompt[slot] = sequence.num_prompt
        self.max_total[slot] = sequence.max_total
        self.priority[slot] = sequence.request.priority
        self.arrival[slot] = sequence.arrival
        self.user[slot] = self._user_number(sequence.request.user)
        self.num_sent_blocks[slot] = num_blocks

    def start_prefilling(self, slots: Sequence[int]) -> None:
        """These occupied slots get their rows."""
        self.prefilling.append(slots)

    def start_decoding(self, slots: NDArray[np.intp]) -> None:
        """These slots have planned their whole prompt."""
        self.phase[slots] = Phase.DECODE
        self.prefilling.keep(self.phase[self.prefilling.slots] == Phase.PREFILL)
        self.decoding.append(slots)

    def stop_decoding(self, slots: list[int]) -> None:
        """These slots have planned their last token."""
        self.phase[slots] = Phase.ENDING
        self.decoding.keep(self.phase[self.decoding.slots] == Phase.DECODE)

    def vacate(self, slot: int) -> None:
        """Take the sequence off its slot. Its row stays until `drop_vacated`, and the slot is not
        used again before `free`."""
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        self._vacated.append((slot, int(self.phase[slot])))
        self.sequences[slot] = None
        self.handle[slot] = -1
        self.phase[slot] = Phase.ENDING
        self.num_vacated += 1
        sequence.slot = -1

    def drop_vacated(self) -> list[int]:
        """Drop the rows of slots vacated since the last call; return these slots."""
        if not self._vacated:
            return []
        vacated, self._vacated = self._vacated, []
        for phase, rows in ((Phase.DECODE, self.decoding), (Phase.PREFILL, self.prefilling)):
            if any(was == phase for _, was in vacated):
                rows.keep(self.phase[rows.slots] == phase)
        return [slot for slot, _ in vacated]

    def free(self, slot: int) -> None:
        """Make a vacated slot available again."""
        self.phase[slot] = Phase.FREE
        self.num_sent_blocks[slot] = 0
        heapq.heappush(self._free, slot)

    # ---- tokens and blocks --------------------------------------------------------------------

    def count_computed(self, index: Index, counts: int | NDArray[np.int64]) -> None:
        """So many more tokens of these slots are computed or planned."""
        self.num_computed[index] += counts

    def count_sampled(self, index: Index) -> None:
        """Each of these slots gets one more token, known when the step is committed."""
        self.num_tokens[index] += 1

    def put_tokens(
        self, slots: NDArray[np.intp], positions: NDArray[np.int64], token_ids: NDArray[np.int32]
    ) -> None:
        """tokens[slots[i], positions[i]] = token_ids[i]."""
        self._flat[self._base[slots] + positions] = token_ids

    def count_sent_blocks(self, slots: NDArray[np.intp], counts: NDArray[np.int32]) -> None:
        """The worker is sent the first `counts[i]` blocks of `slots[i]`."""
        self.num_sent_blocks[slots] = counts

    def is_complete(self, slot: int) -> bool:
        """Whether the slot decodes and has as many tokens as it may get."""
        full = self.num_tokens[slot] >= self.max_total[slot]
        return bool(full and self.phase[slot] == Phase.DECODE)

    # ---- what a policy sees -------------------------------------------------------------------

    def view(self, slots: NDArray[np.intp]) -> RunningView:
        """Read-only columns of these slots for a policy. `slots` becomes read-only, too."""
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
            now=self._clock(),
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
        """Renumber the users, keeping only those who have a slot."""
        self.users, self.user_names = {None: 0}, [None]
        for slot, sequence in enumerate(self.sequences):
            if sequence is not None:
                self.user[slot] = self._user_number(sequence.request.user)
