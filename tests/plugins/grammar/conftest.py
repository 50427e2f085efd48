"""A fake engine (no model) whose grammars come from the reference engine, and what it is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import GrammarEngineContext, GrammarVocabulary
from octavo.engine.core import EngineCore
from octavo.plugins.structured_output.compiler import GrammarCompiler, Tools
from octavo.plugins.structured_output.extension import StructuredOutput
from octavo.plugins.structured_output.grammars import Grammars
from octavo.testing.fake_engine import EOS
from octavo.testing.regex_grammar import RegexGrammarEngine

VOCAB_SIZE = 97  # of `FakeWorker`


def fake_vocabulary() -> GrammarVocabulary:
    """Token 7 ends; 8 to 33 are letters, 34 to 43 digits; then pieces of several characters."""
    tokens = [b""] * VOCAB_SIZE
    for i in range(26):
        tokens[8 + i] = bytes([ord("a") + i])
    for i in range(10):
        tokens[34 + i] = bytes([ord("0") + i])
    for i, piece in enumerate((b"ab", b"abc", b"12", b"no", b"yes", b"a1", b" ", b"zz", b"bb")):
        tokens[44 + i] = piece
    return GrammarVocabulary(tuple(tokens), (EOS,))


def text_of(tokens: list[int]) -> str:
    return b"".join(fake_vocabulary().tokens[i] for i in tokens).decode()


class GatedEngine(RegexGrammarEngine):
    """Compiling waits for `gate` where the pattern says `slow`; counts what it compiles."""

    def __init__(self) -> None:
        super().__init__(NoOptions(), GrammarEngineContext(fake_vocabulary()))
        self.gate = threading.Event()
        self.compiled: list[str] = []
        self.waiting = threading.Event()

    def compile(self, spec: Any) -> bytes:
        self.compiled.append(spec.regex or str(spec.choice))
        if spec.regex and "slow" in spec.regex:
            self.waiting.set()
            assert self.gate.wait(60)
        return super().compile(spec)


@pytest.fixture
def gated() -> GatedEngine:
    return GatedEngine()


def grammars_of(engine: EngineCore) -> Grammars:
    (extension,) = (e for e in engine.extensions.all if isinstance(e, StructuredOutput))
    return extension.grammars


@pytest.fixture
def structured(gated: GatedEngine):
    """Structured output around the gated engine, closed at the end."""
    made: list[StructuredOutput] = []

    def make(clock: Callable[[], float] | None = None, **more: Any) -> StructuredOutput:
        if clock is not None:
            more["clock"] = clock
        grammars = Grammars(GrammarCompiler(lambda: Tools(gated, None)), **more)
        made.append(StructuredOutput(grammars, VOCAB_SIZE))
        return made[-1]

    yield make
    gated.gate.set()
    for extension in made:
        extension.close()
