"""Grammar engine `example`: one of several texts, byte by byte."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts import Options
from octavo.core.contracts.grammar_engine import (
    Grammar,
    GrammarEngine,
    GrammarEngineContext,
    GrammarMatcher,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleEngine(GrammarEngine):
    """Takes `choice` alone; compiling is no work, so it needs no process of its own."""

    isolated = False

    def __init__(self, options: ExampleOptions, context: GrammarEngineContext) -> None:
        self._tokens = context.vocabulary.tokens

    def compile(self, spec: StructuredOutputsParams) -> bytes:
        if spec.choice is None:
            raise RequestError(
                f"structured_outputs: this engine takes 'choice' only, got '{spec.kind}'",
                param="structured_outputs",
            )
        return msgspec.msgpack.encode([text.encode() for text in spec.choice])

    def load(self, data: bytes) -> Grammar:
        return ExampleGrammar(msgspec.msgpack.decode(data, type=list[bytes]), self._tokens)


class ExampleGrammar(Grammar):
    """texts: the choices. tokens: the bytes of each token."""

    def __init__(self, texts: list[bytes], tokens: Sequence[bytes]) -> None:
        self.texts, self.tokens = texts, tokens

    def matcher(self, end_token_ids: Sequence[int]) -> GrammarMatcher:
        return ExampleMatcher(self, frozenset(end_token_ids), ())


class ExampleMatcher(GrammarMatcher):
    """Keeps the accepted tokens; everything else follows from them."""

    def __init__(self, grammar: ExampleGrammar, ends: frozenset[int], taken: Sequence[int]) -> None:
        self._grammar, self._ends, self._taken = grammar, ends, list(taken)

    def _text(self) -> bytes:
        return b"".join(self._grammar.tokens[token] for token in self._taken)

    def _allows(self, token: int, text: bytes) -> bool:
        if self._taken and self._taken[-1] in self._ends:
            return False
        if token in self._ends:
            return text in self._grammar.texts
        piece = self._grammar.tokens[token]
        return bool(piece) and any(
            choice.startswith(text + piece) for choice in self._grammar.texts
        )

    def accept(self, token_id: int) -> bool:
        if not self._allows(token_id, self._text()):
            return False
        self._taken.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self._taken[len(self._taken) - num_tokens :]

    def fork(self) -> GrammarMatcher:
        return ExampleMatcher(self._grammar, self._ends, self._taken)

    def fill(self, bitmask: NDArray[np.int32]) -> None:
        text, count = self._text(), len(self._grammar.tokens)
        bits = np.zeros(len(bitmask) * 32, np.uint8)
        bits[:count] = [self._allows(token, text) for token in range(count)]
        bitmask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    @property
    def complete(self) -> bool:
        return self._text() in self._grammar.texts
