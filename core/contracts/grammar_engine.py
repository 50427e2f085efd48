"""Kind `grammar_engine`: from a description of an output to the tokens that may come next.

An engine works in two processes. Compiling a caller's grammar may take seconds or never end, so
`compile` runs in a process that is killed at its time limit (one a grammar, forked from one that
has made the engine already), and hands over bytes. `load` turns them into a grammar in the engine
process, on a thread of its own; a grammar gives matchers, one a running sequence, which the step
loop asks for masks. An engine whose `compile` is always fast and safe says `isolated = False` and
has both halves in the engine process.

Legend: V vocabulary, the rows of the model's head.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec
from octavo.core.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class GrammarVocabulary:
    """The tokens of a model."""

    tokens: tuple[bytes, ...]  # V, bytes in a text; b"" for special and absent tokens
    end_token_ids: tuple[int, ...]  # the tokenizer's


@dataclass(frozen=True)
class GrammarEngineContext:
    """What a factory gets."""

    vocabulary: GrammarVocabulary


class GrammarMatcher(ABC):
    """Follows one output, token by token."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """The output goes on with this token. False, and nothing changes, when the grammar does not
        allow it. An end token is accepted where the output may end; after it nothing is."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    @abstractmethod
    def fork(self) -> GrammarMatcher:
        """A matcher in the same state that goes its own way."""

    @abstractmethod
    def fill(self, bitmask: NDArray[np.int32]) -> None:
        """Write which tokens `accept` would take to int32[ceil(V / 32)]: bit t % 32 of word
        t // 32, bits from V on clear. Every word is written, whatever it held. Not called after an
        end token."""

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether the output so far is a whole one: it may end here."""


class Grammar(ABC):
    """A compiled grammar. Used by the engine's thread only, once loaded."""

    @abstractmethod
    def matcher(self, end_token_ids: Sequence[int]) -> GrammarMatcher:
        """A matcher at the start of an output. end_token_ids: what ends this output (end and stop
        tokens, each below V; maybe none)."""


class GrammarEngine(ABC):
    """Compiles grammars in one process, loads them in another."""

    # Whether `compile` runs in a process of its own. The engine is then created there too, and its
    # factory must be importable by name (module or file).
    isolated: ClassVar[bool] = True

    def prepare(self) -> None:  # noqa: B027
        """Prepare everything that `compile` needs and that is the same for every grammar. Called
        once, in the process that compiles. Threads started here do not exist where `compile`
        runs."""

    @abstractmethod
    def compile(self, spec: StructuredOutputsParams) -> bytes:
        """Compile a grammar. Raises `RequestError`, with a message for the caller, if it is invalid
        or not supported; any other exception is a failure of this engine."""

    def prepare_load(self) -> None:  # noqa: B027
        """Prepare everything that `load` needs. Called once, in the engine process, on a thread
        beside the step loop."""

    @abstractmethod
    def load(self, data: bytes) -> Grammar:
        """The grammar that `compile` returned. Runs on a thread beside the step loop: long work
        should release the GIL."""


class Spec:
    @hookspec
    def octavo_grammar_engines(self) -> list[Provider[GrammarEngine]]:  # type: ignore[empty-body]
        """Providers of grammar engines.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `GrammarEngineContext`.
        """


KIND = Kind(
    "grammar_engine", Spec, GrammarEngine, GrammarEngineContext, "structured_outputs.engine", "1.1"
)
