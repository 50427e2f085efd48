"""What the built-in processors keep per slot. Legend: S slots, n slots of one call."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.errors import RequestError
from octavo.kernels import upload

Slots = NDArray[np.intp]


def token_array(name: str, tokens: Iterable[int], vocab_size: int) -> NDArray[np.int64]:
    """int64 token ids of the parameter `name`. Raises `RequestError` for an id outside the
    vocabulary: on a GPU an index out of bounds would end the process."""
    array = np.fromiter(tokens, np.int64)
    outside = array[(array < 0) | (array >= vocab_size)]
    if outside.size:
        raise RequestError(
            f"{name} has token id {outside[0]}, expected 0 to {vocab_size - 1}", param=name
        )
    return array


def preallocates(device: torch.device) -> bool:
    """Whether tables have their full size from the first use: where the KV pool leaves room for
    them, and growing would fragment memory."""
    return device.type != "cpu"


def append_rows(table: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """The rows of both; without a copy where the table has none."""
    return torch.cat([table, more]) if len(table) else more


class SlotRows:
    """Gives attached slots rows of tables that are as large as what is attached, not as S; or, with
    `whole`, as S."""

    def __init__(self, max_num_seqs: int, whole: bool = False) -> None:
        self._first, self._most = max_num_seqs if whole else 4, max_num_seqs
        self._row = np.full(max_num_seqs, -1, np.intp)
        self._free: list[int] = []
        self.capacity = 0

    def take(self, slot: int) -> int:
        """A row for the slot; `capacity` may have doubled. One that an attachment which failed has
        left stays the slot's."""
        if self._row[slot] >= 0:
            return int(self._row[slot])
        if not self._free:
            larger = min(max(self._first, 2 * self.capacity), self._most)
            self._free = list(range(larger - 1, self.capacity - 1, -1))
            self.capacity = larger
        row = self._free.pop()
        self._row[slot] = row
        return row

    def drop(self, slot: int) -> None:
        """Give the slot's row back, if it has one."""
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def of(self, slots: Slots) -> Slots:
        """intp[n] rows of the slots; -1 for one without."""
        return self._row[slots]


class SlotEntries:
    """A ragged table: slots, and for each any number of (token id, value) entries."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._device = device
        self._row_of_slot = np.full(max_num_seqs, -1, np.int64)
        self._owner = np.zeros(0, np.intp)
        self._tokens = np.zeros(0, np.int64)
        self._values = np.zeros(0, np.float32)

    def add(self, slot: int, tokens: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        self._owner = np.append(self._owner, np.full(len(tokens), slot, np.intp))
        self._tokens = np.append(self._tokens, tokens)
        self._values = np.append(self._values, values)

    def remove(self, slot: int) -> None:
        keep = self._owner != slot
        self._owner, self._tokens = self._owner[keep], self._tokens[keep]
        self._values = self._values[keep]

    def select(self, slots: Slots, rows: Slots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Entries of slots intp[n] that are the rows intp[n] of the logits: rows int64[m], token
        ids int64[m], values float32[m], on the device."""
        self._row_of_slot[slots] = rows
        entry_rows = self._row_of_slot[self._owner]
        self._row_of_slot[slots] = -1
        tokens, values = self._tokens, self._values
        if len(slots) * len(self._owner) and (entry_rows < 0).any():
            here = entry_rows >= 0
            entry_rows, tokens, values = entry_rows[here], tokens[here], values[here]
        where = upload(np.stack((entry_rows, tokens)), self._device)
        return where[0], where[1], upload(values, self._device)
