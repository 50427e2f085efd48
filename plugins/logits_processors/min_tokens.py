"""Processor `min_tokens`: end and stop tokens are masked until so many tokens were generated."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.plugins.logits_processors.slots import SlotEntries, Slots


class MinTokensProcessor(DeviceLogitsProcessor):
    """Masks `eos_token_ids` and `params.stop_token_ids` while fewer than `params.min_tokens` tokens
    are generated. Ids outside the vocabulary cannot be sampled and need no mask."""

    def __init__(self, options: NoOptions, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._missing = np.zeros(context.max_num_seqs, np.int64)
        self._entries = SlotEntries(context.max_num_seqs, context.device or torch.device("cpu"))

    def attach(self, request: AttachedRequest) -> bool:
        missing = request.params.min_tokens - len(request.output)
        ends = {*request.eos_token_ids, *(request.params.stop_token_ids or ())}
        tokens = np.array([t for t in sorted(ends) if 0 <= t < self._vocab_size], np.int64)
        if missing <= 0 or not len(tokens):
            return False
        self._missing[request.slot] = missing
        self._entries.add(request.slot, tokens, np.full(len(tokens), -np.inf, np.float32))
        return True

    def apply(self, logits: torch.Tensor, slots: Slots, rows: Slots) -> None:
        early = self._missing[slots] > 0
        if early.any():
            entry_rows, tokens, values = self._entries.select(slots[early], rows[early])
            logits[entry_rows, tokens] = values

    def accept(self, slots: Slots, token_ids: NDArray[np.int32]) -> None:
        self._missing[slots] -= 1

    def rollback(self, slot: int, num_tokens: int) -> None:
        self._missing[slot] += num_tokens

    def detach(self, slot: int) -> None:
        self._entries.remove(slot)
