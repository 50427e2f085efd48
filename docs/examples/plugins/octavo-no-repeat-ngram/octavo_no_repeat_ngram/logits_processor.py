"""Logits processor `no_repeat_ngram`: no run of n tokens appears twice in an output.

A request asks for it by `extra_args: {"no_repeat_ngram": 3}`. Its state is an index from each run of
n - 1 tokens to the tokens that followed it, so a step costs a lookup, not a search. The state
follows committed tokens only: it is rebuilt from the output after a preemption, and taken back token
by token after a rejected speculation.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.core.errors import RequestError

Run = tuple[int, ...]


class NoRepeatNgramOptions(Options):
    """What counts."""

    include_prompt: bool = Field(
        default=False, description="Whether runs of the prompt may not be repeated either."
    )


class _History:
    """size: n. tokens: all that count. after: by run of n - 1 tokens, what followed, with repeats
    (of the prompt), so that taking one back is exact."""

    def __init__(self, size: int, tokens: list[int]) -> None:
        self.size, self.tokens = size, list[int]()
        self.after: dict[Run, list[int]] = {}
        for token in tokens:
            self.add(token)

    def _key(self) -> Run | None:
        length = self.size - 1
        if len(self.tokens) < length:
            return None
        return tuple(self.tokens[len(self.tokens) - length :])

    def add(self, token: int) -> None:
        key = self._key()
        if key is not None:
            self.after.setdefault(key, []).append(token)
        self.tokens.append(token)

    def take_back(self) -> None:
        token = self.tokens.pop()
        key = self._key()
        if key is not None:
            followed = self.after[key]
            assert followed[-1] == token, "tokens are taken back in order"
            followed.pop()

    def forbidden(self) -> list[int]:
        key = self._key()
        return sorted(set(self.after.get(key, ()))) if key is not None else []


class NoRepeatNgramProcessor(DeviceLogitsProcessor):
    """A history by slot."""

    def __init__(self, options: NoRepeatNgramOptions, context: LogitsProcessorContext) -> None:
        self._include_prompt = options.include_prompt
        self._histories: dict[int, _History] = {}

    def attach(self, request: AttachedRequest) -> bool:
        size = (request.params.extra_args or {}).get("no_repeat_ngram")
        if size is None:
            return False
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise RequestError(
                f"extra_args.no_repeat_ngram must be a whole number from 1, got {size!r:.40}",
                param="no_repeat_ngram",
            )
        counted = request.prompt.tolist() if self._include_prompt else []
        self._histories[request.slot] = _History(size, counted + request.output.tolist())
        return True

    def accept(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self._histories[slot].add(token)

    def rollback(self, slot: int, num_tokens: int) -> None:
        for _ in range(num_tokens):
            self._histories[slot].take_back()

    def apply(self, logits: torch.Tensor, slots: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            forbidden = self._histories[slot].forbidden()
            if forbidden:
                logits[row, forbidden] = -torch.inf

    def detach(self, slot: int) -> None:
        del self._histories[slot]
