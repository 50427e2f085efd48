"""Engine `none`: requests with structured output are refused."""

from __future__ import annotations

from octavo.core.contracts import NoOptions
from octavo.core.contracts.grammar_engine import Grammar, GrammarEngine, GrammarEngineContext
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM, StructuredOutputsParams

_REFUSAL = "structured output is not available: no grammar engine is in use"


class NoGrammarEngine(GrammarEngine):
    """What is chosen where no other engine can run, or by name."""

    isolated = False

    def __init__(self, options: NoOptions, context: GrammarEngineContext) -> None:
        pass

    def compile(self, spec: StructuredOutputsParams) -> bytes:
        raise RequestError(_REFUSAL, param=PARAM)

    def load(self, data: bytes) -> Grammar:
        raise RequestError(_REFUSAL, param=PARAM)
