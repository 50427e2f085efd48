"""Built-in grammar engines. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, Requirement

_PACKAGE = "octavo.plugins.grammar_engines"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="xgrammar",
        factory=f"{_PACKAGE}.xgrammar_engine:XGrammarEngine",
        options=f"{_PACKAGE}.options:XGrammarOptions",
        requires=(Requirement(package="xgrammar", extra="grammar"),),
        rank=10,
        summary="JSON schemas, regular expressions, choices, EBNF and structural tags by xgrammar.",
    ),
    Provider(
        name="none",
        factory=f"{_PACKAGE}.none:NoGrammarEngine",
        summary="Structured output is refused.",
    ),
]
