"""A grammar engine that is slow and plainly right, to compare others with: regular expressions and
choices, token by token, by the `regex` package's partial matches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import regex
from numpy.typing import NDArray

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import (
    Grammar,
    GrammarEngine,
    GrammarEngineContext,
    GrammarMatcher,
    GrammarVocabulary,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM, StructuredOutputsParams


class RegexGrammarEngine(GrammarEngine):
    """Texts are taken as Latin-1, a byte a character: for patterns in ASCII."""

    name = "regex"
    isolated = False

    def __init__(self, options: NoOptions, context: GrammarEngineContext) -> None:
        self._vocabulary = context.vocabulary

    def compile(self, spec: StructuredOutputsParams) -> bytes:
        if spec.kind not in ("regex", "choice"):
            raise RequestError(f"{PARAM}: {spec.kind} is not supported by this engine", param=PARAM)
        pattern = spec.regex or "|".join(map(regex.escape, spec.choice or ()))
        try:
            regex.compile(pattern)
        except regex.error as error:
            raise RequestError(f"{PARAM}: regex cannot be compiled: {error}", param=PARAM) from None
        return msgspec.msgpack.encode(pattern)

    def load(self, data: bytes) -> Grammar:
        return _Grammar(msgspec.msgpack.decode(data, type=str), self._vocabulary)


class _Grammar(Grammar):
    def __init__(self, pattern: str, vocabulary: GrammarVocabulary) -> None:
        self.pattern, self.tokens = regex.compile(pattern), vocabulary.tokens

    def matcher(self, end_token_ids: Sequence[int]) -> GrammarMatcher:
        return _Matcher(self, frozenset(end_token_ids), [])


class _Matcher(GrammarMatcher):
    """history: the accepted tokens."""

    def __init__(self, grammar: _Grammar, ends: frozenset[int], history: list[int]) -> None:
        self._grammar, self._ends, self._history = grammar, ends, history

    def _text(self, *more: int) -> str:
        tokens = self._grammar.tokens
        ids = [i for i in (*self._history, *more) if i not in self._ends]
        return b"".join(tokens[i] for i in ids).decode("latin-1")

    def _allows(self, token_id: int) -> bool:
        if self._history and self._history[-1] in self._ends:
            return False
        if token_id in self._ends:
            return self.complete
        if not 0 <= token_id < len(self._grammar.tokens) or not self._grammar.tokens[token_id]:
            return False
        return self._grammar.pattern.fullmatch(self._text(token_id), partial=True) is not None

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id):
            return False
        self._history.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._history[-num_tokens:]

    def fork(self) -> GrammarMatcher:
        return _Matcher(self._grammar, self._ends, list(self._history))

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        bits = np.zeros(len(bitmask) * 32, np.uint8)
        allowed = [i for i in range(len(self._grammar.tokens)) if self._allows(i)]
        bits[allowed] = 1
        bitmask[:] = np.packbits(bits, bitorder="little").view("<i4")

    @property
    def complete(self) -> bool:
        return self._grammar.pattern.fullmatch(self._text()) is not None
