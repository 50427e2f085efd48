"""Processor `bias`: `logit_bias` adds to the logits of given tokens, before penalties and masks."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.plugins.logits_processors.slots import SlotEntries, Slots, token_array


class BiasProcessor(DeviceLogitsProcessor):
    """Adds `params.logit_bias`. A masked token (-inf) stays masked."""

    def __init__(self, options: NoOptions, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._entries = SlotEntries(context.max_num_seqs, context.device or torch.device("cpu"))

    def attach(self, request: AttachedRequest) -> bool:
        bias = request.params.logit_bias
        if not bias:
            return False
        tokens = token_array("logit_bias", bias, self._vocab_size)
        self._entries.add(request.slot, tokens, np.fromiter(bias.values(), np.float32))
        return True

    def apply(self, logits: torch.Tensor, slots: Slots, rows: Slots) -> None:
        entry_rows, tokens, values = self._entries.select(slots, rows)
        logits[entry_rows, tokens] += values

    def detach(self, slot: int) -> None:
        self._entries.remove(slot)
