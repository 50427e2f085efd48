"""Small things about texts that several parsers need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def tool_names(tools: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Of tools in OpenAI's form."""
    functions = (tool.get("function") for tool in tools)
    return frozenset(str(f["name"]) for f in functions if isinstance(f, Mapping) and "name" in f)


def valid_unicode(text: str) -> bool:
    """Whether there is no half of a surrogate pair in it, which a JSON escape can make and UTF-8
    cannot hold."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
