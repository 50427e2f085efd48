"""Tool parser `hermes`: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

The format of the Hermes models, of Qwen 2.5 and of Qwen 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.contracts.tool_parser import ToolParser, ToolParserContext
from octavo.server.tool_parsers.json_calls import JsonCalls, Style
from octavo.server.tool_parsers.options import JsonParserOptions
from octavo.server.tool_parsers.stream import TextWithCalls, first_of, partial

START, END = "<tool_call>", "</tool_call>"
STYLE = Style(end=END, lists=True)


class HermesParser(ToolParser):
    """Several calls follow one another, each in its own tags or as objects in the same ones."""

    special_tokens = (START, END)

    def __init__(self, options: JsonParserOptions, context: ToolParserContext) -> None:
        self._eager = options.stream_arguments

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> TextWithCalls:
        return TextWithCalls(
            lambda text, at_line: first_of((START,), text),
            lambda text, at_line: partial((START,), text),
            lambda: JsonCalls(STYLE, eager=self._eager),
        )
