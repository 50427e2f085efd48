"""Built-in tool parsers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_HERE = "octavo.server.tool_parsers"
_JSON = f"{_HERE}.options:JsonParserOptions"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="hermes",
        factory=f"{_HERE}.hermes:HermesParser",
        options=_JSON,
        rank=-1,
        summary="JSON in `<tool_call>` tags: Hermes, Qwen 2.5, Qwen 3",
    ),
    Provider(
        name="llama3_json",
        factory=f"{_HERE}.llama3_json:Llama3JsonParser",
        options=_JSON,
        rank=-1,
        summary="JSON with `name` and `parameters`: Llama 3.1 and later",
    ),
    Provider(
        name="mistral",
        factory=f"{_HERE}.mistral:MistralParser",
        options=_JSON,
        rank=-1,
        summary="JSON after `[TOOL_CALLS]`: Mistral, old and new form",
    ),
    Provider(
        name="pythonic",
        factory=f"{_HERE}.pythonic:PythonicParser",
        rank=-1,
        summary="a Python list of calls: Llama 3.2, Llama 4, ToolACE",
    ),
]
