"""Tool calls that a grammar forces: `tool_choice` required, or one tool by name.

Required: a JSON array of `{"name": ..., "parameters": {...}}`, whatever the model's own format is.
Named: the arguments alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolStream,
)
from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.plugins.tool_parsers.json_calls import JsonCalls, Style
from octavo.plugins.tool_parsers.json_object import ObjectReader
from octavo.server.errors import ApiError
from octavo.server.protocol.tools import Tool, ToolChoice

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_STYLE = Style(lists=True)


def forced_grammar(
    tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool
) -> StructuredOutputsParams:
    """What holds an answer to the choice. Raises `ApiError`."""
    try:
        if choice.name is None:
            schema = required_schema(tools, parallel=parallel)
        else:
            named = next(tool for tool in tools if tool.function.name == choice.name)
            schema = arguments_schema(named)
        return StructuredOutputsParams.make({"json": schema})
    except RequestError as error:
        message = error.message.replace("structured_outputs", "tools", 1)
        raise ApiError(message, param="tools", code="invalid_value") from None


def required_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """JSON schema of one call or more."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    try:
        _add_calls(tools, calls, definitions)
    except RecursionError:
        raise ApiError(
            "tools: a schema is nested too deep", param="tools", code="invalid_value"
        ) from None
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return schema


def _add_calls(
    tools: Sequence[Tool], calls: list[dict[str, Any]], definitions: dict[str, Any]
) -> None:
    for index, tool in enumerate(tools):
        schema = arguments_schema(tool)
        for name, definition in _definitions(schema).items():
            definitions[f"t{index}_{name}"] = _renamed(definition, index)
        arguments = {
            key: item for key, item in schema.items() if key not in ("$defs", "definitions")
        }
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [tool.function.name]},
                    "parameters": _renamed(arguments, index),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """JSON schema of a tool's arguments, which are an object."""
    given = tool.function.parameters or NO_ARGUMENTS
    return given if given.get("type") == "object" else {"type": "object", **given}


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in ("definitions", "$defs"):
        value = schema.get(key)
        found |= value if isinstance(value, dict) else {}
    return found


def _renamed(schema: Any, index: int) -> Any:
    """With references to where the tool's definitions are in the common schema."""
    text = json.dumps(schema)
    for key in ("definitions", "$defs"):
        text = text.replace(f'"#/{key}/', f'"#/$defs/t{index}_')
    return json.loads(text)


class RequiredCalls(ToolStream):
    """Reads what `required_schema` describes; what is something else is text."""

    def __init__(self) -> None:
        self._region = JsonCalls(_STYLE, eager=True)

    def feed(self, text: str) -> list[ToolEvent]:
        region = self._region
        if region.rest is not None or region.failed is not None:
            return [Text(text)] if text.strip() else []
        return self._after(region.feed(text))

    def finish(self, truncated: bool) -> list[ToolEvent]:
        region = self._region
        if region.rest is not None or region.failed is not None:
            return []
        return self._after(region.finish(truncated))

    def _after(self, events: list[ToolEvent]) -> list[ToolEvent]:
        more = self._region.failed or self._region.rest or ""
        return [*events, Text(more)] if more.strip() else events


class NamedCall(ToolStream):
    """Reads the arguments of one tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name
        self._reader = ObjectReader(value_of="arguments")
        self._sent = 0

    def feed(self, text: str) -> list[ToolEvent]:
        reader, events = self._reader, list[ToolEvent]()
        if reader.done or reader.bad:
            return [Text(text)] if text.strip() else []
        stop = reader.feed(text)
        pieces = reader.members["arguments"].pieces
        if pieces and self._name is not None:
            events.append(CallBegin(self._name))
            self._name = None
        new, self._sent = "".join(pieces[self._sent :]), len(pieces)
        if new:
            events.append(CallArguments(new))
        if reader.done:
            events.append(CallEnd())
        if text[stop:].strip():
            events.append(Text(text[stop:]))
        return events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        left = self._reader.unfinished
        return [CallArguments(left)] if truncated and left and self._name is None else []
