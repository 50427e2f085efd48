"""Host logits processor that keeps outputs to their grammars."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.grammar_engine import Grammar, GrammarMatcher
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    Ending,
    HostLogitsProcessor,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM

_STUCK = f"{PARAM}: the grammar allows no token after the output so far"


class _Row:
    """One slot's matcher, and the mask of its next token, int32[ceil(V / 32)]."""

    __slots__ = ("ends", "mask", "matcher", "min_tokens", "num_tokens")

    def __init__(self, matcher: GrammarMatcher, ends: frozenset[int], min_tokens: int) -> None:
        self.matcher, self.ends, self.min_tokens = matcher, ends, min_tokens
        self.num_tokens = 0
        self.mask: NDArray[np.int32] | None = None


class GrammarProcessor(HostLogitsProcessor):
    """grammar_of: the compiled grammar of a request, by its handle. vocab_size: V.

    End and stop tokens are allowed where the output may end, and nowhere else. An output that can
    only end does so where no end token can be sampled: where there is none, and while `min_tokens`
    forbids them.
    """

    def __init__(self, grammar_of: Callable[[int], Grammar], vocab_size: int) -> None:
        self._grammar_of, self._vocab_size = grammar_of, vocab_size
        self._words = -(-vocab_size // 32)
        self._rows: dict[int, _Row] = {}

    def attach(self, request: AttachedRequest) -> bool:
        params = request.params
        if params.structured_outputs is None:
            return False
        ends = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        known = sorted(token for token in ends if 0 <= token < self._vocab_size)
        matcher = self._grammar_of(request.handle).matcher(known)
        row = _Row(matcher, frozenset(known), params.min_tokens)
        for token in request.output.tolist():
            if not matcher.accept(token):
                raise RequestError(_outside(token))
        row.num_tokens = len(request.output)
        ending = self._look_ahead(row)
        if ending is not None:
            raise RequestError(ending.error or f"{PARAM}: the grammar allows an empty output only")
        self._rows[request.slot] = row
        return True

    def mask(self, slots: NDArray[np.intp], bitmask: NDArray[np.int32]) -> None:
        for row, slot in enumerate(slots.tolist()):
            mask = self._rows[slot].mask
            if mask is not None:  # None after an end token
                bitmask[row] &= mask

    def accept(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> list[Ending] | None:
        endings = []
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            row = self._rows[slot]
            if not row.matcher.accept(token):
                endings.append(Ending(slot, _outside(token)))
                continue
            row.num_tokens += 1
            if token in row.ends:
                row.mask = None
                continue
            ending = self._look_ahead(row)
            if ending is not None:
                endings.append(Ending(slot, ending.error))
        return endings

    def rollback(self, slot: int, num_tokens: int) -> None:
        row = self._rows[slot]
        row.matcher.rollback(num_tokens)
        row.num_tokens -= num_tokens
        self._look_ahead(row)

    def detach(self, slot: int) -> None:
        del self._rows[slot]

    def _look_ahead(self, row: _Row) -> Ending | None:
        """Make the mask of the next token; an ending when there can be none."""
        mask = row.mask = np.empty(self._words, np.int32)
        row.matcher.fill(mask)
        if not mask.any():
            return Ending(-1, None if row.matcher.complete else _STUCK)
        if row.num_tokens < row.min_tokens and row.matcher.complete and _only(mask, row.ends):
            return Ending(-1)
        return None


def _only(mask: NDArray[np.int32], tokens: frozenset[int]) -> bool:
    """Whether a mask allows nothing but these tokens."""
    rest = mask.copy().view(np.uint32)
    for token in tokens:
        rest[token // 32] &= ~np.uint32(1 << (token % 32))
    return not rest.any()


def _outside(token: int) -> str:
    return f"{PARAM}: token {token} does not keep to the grammar"
