"""Host logits processor that keeps outputs to their grammars."""

from __future__ import annotations

import logging
import time
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

logger = logging.getLogger(__name__)

MAX_TOKEN_S = 0.25
"""Seconds of CPU that following a grammar may take for one token of one sequence."""

MAX_REPLAY_S = 1.0
"""And for all the output of a sequence that was preempted."""

_STUCK = f"{PARAM}: the grammar allows no token after the output so far"


class _Row:
    """One slot's matcher. open: no end token was accepted yet."""

    __slots__ = ("ends", "matcher", "min_tokens", "num_tokens", "open")

    def __init__(self, matcher: GrammarMatcher, ends: frozenset[int], min_tokens: int) -> None:
        self.matcher, self.ends, self.min_tokens = matcher, ends, min_tokens
        self.num_tokens = 0
        self.open = True


class GrammarProcessor(HostLogitsProcessor):
    """grammar_of: the compiled grammar of a request, by its handle. vocab_size: V.

    End and stop tokens are allowed where the output may end, and nowhere else. An output that can
    only end does so where no end token can be sampled: where there is none, and while `min_tokens`
    forbids them. clock: CPU seconds of this thread.
    """

    def __init__(
        self,
        grammar_of: Callable[[int], Grammar],
        vocab_size: int,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._grammar_of, self._vocab_size, self._clock = grammar_of, vocab_size, clock
        self._scratch = np.empty(-(-vocab_size // 32), np.int32)
        self._rows: dict[int, _Row] = {}

    def attach(self, request: AttachedRequest) -> bool:
        params = request.params
        if params.structured_outputs is None:
            return False
        ends = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        known = sorted(token for token in ends if 0 <= token < self._vocab_size)
        matcher = self._grammar_of(request.handle).matcher(known)
        row = _Row(matcher, frozenset(known), params.min_tokens)
        began = self._clock()
        for token in request.output.tolist():
            if not self._take(row, token):
                raise RequestError(_outside(token), param=PARAM)
            if self._clock() - began > MAX_REPLAY_S:
                raise RequestError(
                    f"{PARAM}: the grammar is too ambiguous: following the output again after a "
                    f"preemption took over {MAX_REPLAY_S:g} s",
                    param=PARAM,
                )
        self._rows[request.slot] = row
        return True

    def mask(self, slots: NDArray[np.intp], bitmask: NDArray[np.int32]) -> list[Ending]:
        endings = []
        for index, slot in enumerate(slots.tolist()):
            row = self._rows[slot]
            if not row.open:
                continue  # it goes on after an end token: the engine's business
            began = self._clock()
            try:
                row.matcher.fill(self._scratch)
                ending = self._ending(slot, row) or self._too_slow(slot, began)
            except Exception as error:
                ending = _failed(slot, error)
            if ending is None:
                bitmask[index] &= self._scratch
            else:
                endings.append(ending)
        return endings

    def accept(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> list[Ending]:
        endings = []
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            began = self._clock()
            try:
                kept = self._take(self._rows[slot], token)
                ending = self._too_slow(slot, began) if kept else Ending(slot, _outside(token))
            except Exception as error:
                ending = _failed(slot, error)
            if ending is not None:
                endings.append(ending)
        return endings

    def rollback(self, slot: int, num_tokens: int) -> None:
        row = self._rows[slot]
        row.matcher.rollback(num_tokens)
        row.num_tokens -= num_tokens
        row.open = row.open or num_tokens > 0

    def detach(self, slot: int) -> None:
        del self._rows[slot]

    @staticmethod
    def _take(row: _Row, token: int) -> bool:
        if not row.matcher.accept(token):
            return False
        row.num_tokens += 1
        row.open = token not in row.ends
        return True

    def _too_slow(self, slot: int, began: float) -> Ending | None:
        """A very ambiguous grammar takes longer with every token, and everybody waits for it."""
        spent = self._clock() - began
        if spent <= MAX_TOKEN_S:
            return None
        return Ending(
            slot,
            f"{PARAM}: the grammar is too ambiguous: following it took {spent:.2f} s for one "
            f"token, at most {MAX_TOKEN_S:g} s are allowed",
        )

    def _ending(self, slot: int, row: _Row) -> Ending | None:
        """How the sequence ends when its mask, in the scratch buffer, leaves nothing to sample."""
        mask = self._scratch
        if not mask.any():
            return Ending(slot, None if row.matcher.complete else _STUCK)
        early = row.num_tokens < row.min_tokens
        if early and row.matcher.complete and _only(mask, row.ends):
            return Ending(slot)
        return None


def _only(mask: NDArray[np.int32], tokens: frozenset[int]) -> bool:
    """Whether a mask allows nothing but these tokens."""
    rest = mask.view(np.uint32).copy()
    for token in tokens:
        rest[token // 32] &= ~np.uint32(1 << (token % 32))
    return not rest.any()


def _failed(slot: int, error: Exception) -> Ending:
    """A matcher that raises fails its own sequence."""
    logger.error("a grammar's matcher failed", exc_info=error)
    return Ending(slot, f"{PARAM}: the grammar's matcher failed: {type(error).__name__}: {error}")


def _outside(token: int) -> str:
    return f"{PARAM}: token {token} does not keep to the grammar"
