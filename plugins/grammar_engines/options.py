"""Options of the built-in grammar engines."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts import Options


class XGrammarOptions(Options):
    """Of the JSON that is generated."""

    max_whitespace: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Most whitespace characters in a row where JSON allows any; more cost time and "
        "memory in compiling.",
    )
