"""Writes the tables of docs/server.md from the models, between its markers.

    python -m octavo.server.command_line.reference docs/server.md

A test compares the page with what this makes, so that it cannot grow stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.server.app.openapi import document
from octavo.server.app.openapi_page import type_text
from octavo.server.app.routes import OPERATIONS
from octavo.server.openai.protocol.chat import ChatRequest
from octavo.server.openai.protocol.common import Request
from octavo.server.openai.protocol.completions import CompletionRequest
from octavo.server.openai.protocol.responses import ResponsesRequest
from octavo.server.openai.protocol.sampling import SamplingRequest

REQUESTS: tuple[type[Request], ...] = (ChatRequest, CompletionRequest)


def render(page: str) -> str:
    """The page with fresh tables."""
    tables = {
        "operations": "\n".join(_operations()),
        "parameters": "\n".join(_parameters()),
        "refused": "\n".join(_refused(REQUESTS)),
        "responses": "\n".join(_responses()),
        "refused responses": "\n".join(_refused((ResponsesRequest,))),
    }
    for name, table in tables.items():
        before, opening, rest = page.partition(f"<!-- {name} -->\n")
        _, closing, after = rest.partition("<!-- end -->")
        assert closing, f"the page has a place for '{name}'"
        page = f"{before}{opening}{table}\n{closing}{after}"
    return page


def _operations() -> Iterator[str]:
    yield "| route | |"
    yield "|---|---|"
    for operation in OPERATIONS:
        path = operation.path.replace(":path", "")
        yield f"| `{operation.method} {path}` | {operation.summary} |"


def _parameters() -> Iterator[str]:
    schemas = document(OPERATIONS, "", keys=False, open_paths=())["components"]["schemas"]
    chat, text = (schemas[cls.__name__]["properties"] for cls in REQUESTS)
    yield "| parameter | type | chat | completions | |"
    yield "|---|---|---|---|---|"
    for name in [*text, *(name for name in chat if name not in text)]:
        about = text.get(name) or chat[name]
        if name in chat and name in text and type_text(chat[name]) != type_text(about):
            kind = f"{type_text(chat[name])} (chat), {type_text(about)}"
        else:
            kind = type_text(about)
        marks = " | ".join("yes" if name in side else "" for side in (chat, text))
        yield f"| `{name}` | {kind} | {marks} | {about.get('description', '')} |"


def _responses() -> Iterator[str]:
    """Parameters that /v1/responses alone has, or has otherwise."""
    schemas = document(OPERATIONS, "", keys=False, open_paths=())["components"]["schemas"]
    properties = schemas[ResponsesRequest.__name__]["properties"]
    yield "| parameter | type | |"
    yield "|---|---|---|"
    for name, about in properties.items():
        if name not in SamplingRequest.model_fields:
            yield f"| `{name}` | {type_text(about)} | {about.get('description', '')} |"


def _refused(requests: Iterable[type[Request]]) -> Iterator[str]:
    yield "| parameter | accepted values | why |"
    yield "|---|---|---|"
    merged = {name: entry for cls in requests for name, entry in cls.unsupported.items()}
    for name, (why, inert) in sorted(merged.items()):
        accepted = ", ".join(f"`{json.dumps(value)}`" for value in (None, *inert))
        yield f"| `{name}` | {accepted} | {why} |"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render(path.read_text()))
