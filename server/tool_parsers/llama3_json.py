"""Tool parser `llama3_json`: `{"name": ..., "parameters": {...}}` as the answer.

The format of Llama 3.1 and later for custom tools. Several calls are separated by semicolons, or
stand in an array; `<|python_tag|>` may come first. An object counts as a call where it stands at
the start of a line and names one of the request's tools, so that JSON in an ordinary answer stays
text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.contracts.tool_parser import ToolParser, ToolParserContext
from octavo.server.tool_parsers.json_calls import JsonCalls, Style
from octavo.server.tool_parsers.options import JsonParserOptions
from octavo.server.tool_parsers.stream import TextWithCalls, indent, partial
from octavo.server.tool_parsers.texts import tool_names

TAG = "<|python_tag|>"
STYLE = Style(lists=True, separators=";,")
_OPENING = re.compile(r"<\|python_tag\|>|^[ \t]*(?=[{\[])", re.MULTILINE)


class Llama3JsonParser(ToolParser):
    """See the module."""

    special_tokens = (TAG,)

    def __init__(self, options: JsonParserOptions, context: ToolParserContext) -> None:
        self._eager = options.stream_arguments

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> TextWithCalls:
        names = tool_names(tools)
        return TextWithCalls(
            find_opening,
            lambda text, at_line: partial((TAG,), text) or indent(text, at_line),
            lambda: JsonCalls(STYLE, known=names, eager=self._eager),
        )


def find_opening(text: str, at_line: bool) -> tuple[int, int] | None:
    """A tag, or a bracket that begins a line."""
    for match in _OPENING.finditer(text):
        if at_line or match.start() > 0 or match[0] == TAG:
            return match.span()
    return None
