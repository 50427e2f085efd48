"""Processor `penalties`: repetition, then frequency, then presence (vLLM's order and formulas).

    repetition  tokens of prompt and output: logit / p where positive, logit * p elsewhere
    frequency   logit - p * (times the token was generated)
    presence    logit - p, for tokens that were generated

Only known tokens of a slot can change, so a step costs their number, not the vocabulary. Slots keep
their tokens with repeats, filled up on the right with the first one: every repeat writes the same
value, computed from the same old one. Legend: C rows for attached slots, L longest sequence, V
vocabulary, n rows of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.kernels import upload
from octavo.plugins.logits_processors.slots import SlotRows, Slots, append_rows, preallocates
from octavo.plugins.logits_processors.table_sizes import penalties_bytes


class PenaltiesProcessor(DeviceLogitsProcessor):
    """Keeps int64[L] tokens for each attached slot, and int32[V] counts of generated tokens for
    those with a frequency or presence penalty."""

    def __init__(self, options: NoOptions, context: LogitsProcessorContext) -> None:
        slots = context.max_num_seqs
        self._device = context.device or torch.device("cpu")
        self._whole, self._sizes = preallocates(self._device), (slots, context.max_model_len)
        self._rows = SlotRows(slots, self._whole)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=self._device)
        self._count_rows = SlotRows(slots, self._whole)
        self._counts = torch.zeros(0, context.vocab_size, dtype=torch.int32, device=self._device)
        self._length = np.zeros(slots, np.intp)
        self._repetition = np.ones(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)

    def attach(self, request: AttachedRequest) -> bool:
        params, slot = request.params, request.slot
        counted = bool(params.frequency_penalty or params.presence_penalty)
        if params.repetition_penalty == 1 and not counted:
            return False
        known = np.concatenate([request.prompt, request.output]).astype(np.int64)
        row = self._rows.take(slot)
        self._reserve(len(known))
        self._tokens[row].fill_(int(known[0]) if len(known) else 0)
        self._tokens[row, : len(known)].copy_(self._upload(known))
        self._length[slot] = len(known)
        # Not 0, which smaller numbers are in float32: a logit of 0 would become NaN.
        self._repetition[slot] = max(params.repetition_penalty, float(np.finfo(np.float32).tiny))
        self._frequency[slot] = params.frequency_penalty
        self._presence[slot] = params.presence_penalty
        if counted:
            self._attach_counts(slot, request.output)
        return True

    def _attach_counts(self, slot: int, output: NDArray[np.int32]) -> None:
        row = self._count_rows.take(slot)
        missing = self._count_rows.capacity - len(self._counts)
        vocab_size = self._counts.shape[1]
        if missing > 0:
            self._counts = append_rows(self._counts, self._counts.new_zeros(missing, vocab_size))
        counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
        self._counts[row].copy_(self._upload(counts))

    def _reserve(self, length: int) -> None:
        """Make room for C rows of `length` tokens."""
        rows, columns = self._tokens.shape
        if length > columns:
            most = self._sizes[1]
            more = max(length, most if self._whole else min(max(64, 2 * length), most)) - columns
            first = self._tokens[:, :1] if columns else self._tokens.new_zeros(rows, 1)
            self._tokens = torch.cat([self._tokens, first.expand(rows, more)], dim=1)
        if self._rows.capacity > rows:
            more = self._rows.capacity - rows
            empty = self._tokens.new_zeros(more, self._tokens.shape[1])
            self._tokens = append_rows(self._tokens, empty)

    def device_bytes(self) -> int:
        return penalties_bytes(*self._sizes, self._counts.shape[1])

    def apply(self, logits: torch.Tensor, slots: Slots, rows: Slots) -> None:
        known = self._length[slots] > 0
        repeating = known & (self._repetition[slots] != 1)
        if repeating.any():
            mine = slots[repeating]
            where = self._places(mine, rows[repeating])
            old, penalty = logits[where], self._upload(self._repetition[mine])[:, None]
            logits[where] = torch.where(old > 0, old / penalty, old * penalty)
        counted = known & (self._count_rows.of(slots) >= 0)
        if counted.any():
            mine = slots[counted]
            where = self._places(mine, rows[counted])
            counts = self._counts[self._upload(self._count_rows.of(mine))[:, None], where[1]]
            penalties = self._upload(np.stack((self._frequency[mine], self._presence[mine])))
            frequency, presence = penalties[:, :, None]
            logits[where] = logits[where] - frequency * counts - presence * (counts > 0)

    def _places(self, slots: Slots, rows: Slots) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows int64[n, 1] and token ids int64[n, L] of the known tokens of slots intp[n]."""
        where = self._upload(np.stack((rows, self._rows.of(slots))))
        tokens = self._tokens[where[1], : int(self._length[slots].max())]
        return where[0][:, None], tokens

    def _upload(self, values: NDArray[Any]) -> torch.Tensor:
        return upload(values, self._device)

    def accept(self, slots: Slots, token_ids: NDArray[np.int32]) -> None:
        lengths = self._length[slots]
        self._reserve(int(lengths.max()) + 1)
        rows = self._rows.of(slots)
        empty = lengths == 0
        if empty.any():
            first = self._upload(np.stack((rows[empty], token_ids[empty])))
            self._tokens[first[0]] = first[1][:, None]
        where = self._upload(np.stack((rows, lengths, token_ids)))
        self._tokens[where[0], where[1]] = where[2]
        self._length[slots] += 1
        count_rows = self._count_rows.of(slots)
        counted = count_rows >= 0
        if counted.any():
            new = self._upload(np.stack((count_rows[counted], token_ids[counted])))
            self._count(new[0], new[1], 1)

    def _count(self, rows: torch.Tensor, tokens: torch.Tensor, step: int) -> None:
        """Add `step` to the counts of int64[n] tokens in the rows int64[n]."""
        steps = torch.full_like(tokens, step, dtype=torch.int32)
        self._counts.index_put_((rows, tokens), steps, accumulate=True)

    def rollback(self, slot: int, num_tokens: int) -> None:
        row = int(self._rows.of(np.array([slot]))[0])
        end = int(self._length[slot])
        gone = self._tokens[row, end - num_tokens : end].clone()
        count_row = int(self._count_rows.of(np.array([slot]))[0])
        if count_row >= 0:
            self._count(torch.full_like(gone, count_row), gone, -1)
        self._tokens[row, end - num_tokens : end] = self._tokens[row, 0]
        self._length[slot] = end - num_tokens

    def detach(self, slot: int) -> None:
        self._rows.drop(slot)
        self._count_rows.drop(slot)
