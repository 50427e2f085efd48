"""Tool calls that a grammar forces: `tool_choice` required, or one tool by name.

Required: a JSON array of `{"name": ..., "parameters": {...}}`, whatever the model's own format is.
Named: the arguments alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolStream,
)
from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.tools import Tool, ToolChoice
from octavo.server.tool_parsers.json_calls import JsonCalls, Style
from octavo.server.tool_parsers.json_object import ObjectReader

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
    """JSON schema of one call or more. Each tool's schema is a definition of its own, under the
    tool's name, so that errors tell it."""
    definitions: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for tool in tools:
        name = tool.function.name
        place = f"#/$defs/{name}"
        try:
            definitions[name] = _moved(arguments_schema(tool), place)
        except RecursionError:
            raise ApiError(
                "tools: a schema is nested too deep", param="tools", code="invalid_value"
            ) from None
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [name]},
                    "parameters": {"$ref": place},
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return {**schema, "$defs": definitions}


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """JSON schema of a tool's arguments, which are an object."""
    given = tool.function.parameters or NO_ARGUMENTS
    return given if given.get("type") == "object" else {"type": "object", **given}


def _moved(schema: Any, place: str) -> Any:
    """A schema that is put at this place of another one: its references lead there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(item, place) for key, item in schema.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


class RequiredCalls(ToolStream):
    """Reads what `required_schema` describes; what is something else is text. The beginning of a
    call whose name is not known, at the end of an answer that was cut off, is nothing."""

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
        events = region.finish(truncated)
        return events if truncated else self._after(events)

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
