"""Tool parser `example`: a line `CALL name {"argument": 1}` is a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from octavo.core.contracts import Options
from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolParser,
    ToolParserContext,
    ToolStream,
)


class ExampleOptions(Options):
    """How calls begin."""

    mark: str = Field(default="CALL ", min_length=1, description="What a call begins with.")


class ExampleParser(ToolParser):
    """Knows the names of the tools that a request offers."""

    def __init__(self, options: ExampleOptions, context: ToolParserContext) -> None:
        self._mark = options.mark

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        return ExampleStream(self._mark, {tool["function"]["name"] for tool in tools})


class ExampleStream(ToolStream):
    """Reads line by line: text of a line that may become a call is held back until its end."""

    def __init__(self, mark: str, names: set[str]) -> None:
        self._mark, self._names = mark, names
        self._line = ""

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        for piece in text.splitlines(keepends=True):
            self._line += piece
            begins = self._mark.startswith(self._line[: len(self._mark)])
            if self._line.endswith("\n") or not begins:
                events += self._end_line()
        return events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        return self._end_line()

    def _end_line(self) -> list[ToolEvent]:
        line, self._line = self._line, ""
        name, _, arguments = line.removeprefix(self._mark).partition(" ")
        if line.startswith(self._mark) and name.strip() in self._names:
            given = _arguments(arguments)
            if given is not None:
                return [CallBegin(name.strip()), CallArguments(given), CallEnd()]
        # The rest of this line is text too, however it begins.
        return [Text(line)] if line else []


def _arguments(text: str) -> str | None:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return None
    return json.dumps(value) if isinstance(value, dict) else None
