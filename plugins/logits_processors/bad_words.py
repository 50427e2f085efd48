"""Processor `bad_words`: token sequences that may not appear in the output."""

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
from octavo.core.errors import RequestError
from octavo.kernels import upload
from octavo.plugins.logits_processors.slots import SlotRows, Slots, token_array

_ANY = -1
_NOTHING = -2


class BadWordsProcessor(DeviceLogitsProcessor):
    """Masks the last token of each of `params.bad_words_token_ids` when the tokens before it are
    the last ones generated. As in vLLM, only the output is looked at: a word that began in the
    prompt is not seen.

    Words of all attached slots lie in one table (N words, P tokens before the last, aligned to the
    right and filled up with `_ANY`), so that a step is a few vector operations.
    """

    def __init__(self, options: NoOptions, context: LogitsProcessorContext) -> None:
        self._vocab_size = context.vocab_size
        self._device = context.device or torch.device("cpu")
        self._masked = torch.full((), -torch.inf, device=self._device)
        self._row_of_slot = np.full(context.max_num_seqs, -1, np.intp)
        self._owner = np.zeros(0, np.intp)
        self._before = np.zeros((0, 0), np.int64)
        self._last = np.zeros(0, np.int64)
        self._rows = SlotRows(context.max_num_seqs)
        self._output = np.zeros((0, 0), np.int64)
        self._length = np.zeros(context.max_num_seqs, np.intp)

    def attach(self, request: AttachedRequest) -> bool:
        words = request.params.bad_words_token_ids
        if not words:
            return False
        if not all(words):
            raise RequestError("bad_words has a word without tokens", param="bad_words")
        arrays = [token_array("bad_words", word, self._vocab_size) for word in words]
        width = max(self._before.shape[1], *(len(word) - 1 for word in arrays), 0)
        before = np.full((len(self._owner) + len(arrays), width), _ANY, np.int64)
        before[: len(self._owner), width - self._before.shape[1] :] = self._before
        for number, word in enumerate(arrays, start=len(self._owner)):
            before[number, width - len(word) + 1 :] = word[:-1]
        self._before = before
        self._owner = np.append(self._owner, np.full(len(arrays), request.slot, np.intp))
        self._last = np.append(self._last, [word[-1] for word in arrays])
        row = self._rows.take(request.slot)
        length = len(request.output)
        self._reserve(length)
        self._output[row, :length] = request.output
        self._length[request.slot] = length
        return True

    def _reserve(self, length: int) -> None:
        rows, columns = self._output.shape
        if self._rows.capacity > rows or length > columns:
            columns = max(columns, 64, 2 * length if length > columns else 0)
            larger = np.zeros((self._rows.capacity, columns), np.int64)
            larger[: self._output.shape[0], : self._output.shape[1]] = self._output
            self._output = larger

    def apply(self, logits: torch.Tensor, slots: Slots, rows: Slots) -> None:
        self._row_of_slot[slots] = rows
        logit_rows = self._row_of_slot[self._owner]
        self._row_of_slot[slots] = -1
        here = (logit_rows >= 0).nonzero()[0]
        before, owner = self._before[here], self._owner[here]
        match = ((before == _ANY) | (before == self._suffix(owner))).all(axis=1)
        hit = here[match]
        if hit.size:
            where = upload(np.stack((logit_rows[hit], self._last[hit])), self._device)
            logits[where[0], where[1]] = self._masked

    def _suffix(self, slots: Slots) -> NDArray[np.int64]:
        """int64[n, P]: the last tokens generated for each slot, `_NOTHING` before the first."""
        width = self._before.shape[1]
        columns = self._length[slots][:, None] + np.arange(-width, 0)
        tokens = self._output[self._rows.of(slots)[:, None], np.maximum(columns, 0)]
        return np.where(columns < 0, _NOTHING, tokens)

    def accept(self, slots: Slots, token_ids: NDArray[np.int32]) -> None:
        lengths = self._length[slots]
        self._reserve(int(lengths.max()) + 1)
        self._output[self._rows.of(slots), lengths] = token_ids
        self._length[slots] += 1

    def rollback(self, slot: int, num_tokens: int) -> None:
        self._length[slot] -= num_tokens

    def detach(self, slot: int) -> None:
        keep = self._owner != slot
        self._owner, self._last = self._owner[keep], self._last[keep]
        self._before = self._before[keep] if keep.any() else np.zeros((0, 0), np.int64)
        self._rows.drop(slot)
