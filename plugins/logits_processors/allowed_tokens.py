"""Processor `allowed_tokens`: with `allowed_token_ids`, nothing else may be sampled."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.kernels import upload
from octavo.plugins.logits_processors.slots import (
    SlotRows,
    Slots,
    append_rows,
    preallocates,
    token_array,
)
from octavo.plugins.logits_processors.table_sizes import allowed_tokens_bytes


class AllowedTokensProcessor(DeviceLogitsProcessor):
    """Masks every other token with -inf. Keeps bool[V] for each attached slot."""

    def __init__(self, options: NoOptions, context: LogitsProcessorContext) -> None:
        self._device = context.device or torch.device("cpu")
        self._slots = context.max_num_seqs
        self._rows = SlotRows(context.max_num_seqs, preallocates(self._device))
        self._forbidden = torch.ones(0, context.vocab_size, dtype=torch.bool, device=self._device)

    def attach(self, request: AttachedRequest) -> bool:
        allowed = request.params.allowed_token_ids
        if allowed is None:
            return False
        vocab_size = self._forbidden.shape[1]
        forbidden = np.ones(vocab_size, np.bool_)
        forbidden[token_array("allowed_token_ids", allowed, vocab_size)] = False
        row = self._rows.take(request.slot)
        if self._rows.capacity > len(self._forbidden):
            more = self._forbidden.new_ones(self._rows.capacity - len(self._forbidden), vocab_size)
            self._forbidden = append_rows(self._forbidden, more)
        self._forbidden[row].copy_(upload(forbidden, self._device))
        return True

    def device_bytes(self) -> int:
        return allowed_tokens_bytes(self._slots, self._forbidden.shape[1])

    def apply(self, logits: torch.Tensor, slots: Slots, rows: Slots) -> None:
        forbidden = self._forbidden[upload(self._rows.of(slots), self._device)]
        if len(rows) == len(logits):  # rows ascend: they are all, in order
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            index = upload(rows, self._device)
            logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)

    def detach(self, slot: int) -> None:
        self._rows.drop(slot)
