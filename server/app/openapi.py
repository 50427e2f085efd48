"""The OpenAPI document, derived from the operations and their models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from octavo.server.openai.protocol.common import ErrorResponse

if TYPE_CHECKING:
    from octavo.server.app.routes import Operation

ERRORS = {
    "400": "A parameter is wrong, or the prompt does not fit.",
    "401": "An API key is needed.",
    "404": "No such model.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "500": "An error of the server; its log has the details.",
    "503": "The engine is loading, stopping, or has stopped.",
}


def document(
    operations: Iterable[Operation],
    version: str,
    *,
    keys: bool,
    open_paths: Iterable[str],
    more: Iterable[tuple[str, str, dict[str, Any]]] = (),
) -> dict[str, Any]:
    """An OpenAPI 3.1 document. keys: whether API keys are asked for (but not on open_paths). more:
    path, method and description of further routes."""
    operations = list(operations)
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path", "")
        item = _operation(operation, schemas)
        if keys and path not in open_paths:
            item["security"] = [{"key": []}]
        paths.setdefault(path, {})[operation.method.lower()] = item
    for path, method, item in more:
        paths.setdefault(path, {})[method] = item | ({"security": [{"key": []}]} if keys else {})
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version},
        "paths": paths,
        "components": components,
    }


def _schemas(
    operations: list[Operation],
) -> tuple[dict[type[BaseModel], dict[str, Any]], dict[str, Any]]:
    """A reference for every model, and the components that they refer to."""
    requests = {model for operation in operations for model in operation.requests}
    answers: set[type[BaseModel]] = {ErrorResponse}
    for operation in operations:
        answers |= {model for model in (operation.response, operation.chunk) if model}
    wanted: list[tuple[type[BaseModel], Literal["validation", "serialization"]]]
    wanted = [(model, "validation") for model in _by_name(requests)]
    wanted += [(model, "serialization") for model in _by_name(answers)]
    found, definitions = models_json_schema(wanted, ref_template="#/components/schemas/{model}")
    components = definitions["$defs"]
    inputs = _reachable(components, [model.__name__ for model in requests])
    for name in inputs:
        _allow_null(components[name])
    references = {model: found[model, mode] for model, mode in wanted}
    return references, {"schemas": components}


def _by_name(models: Iterable[type[BaseModel]]) -> list[type[BaseModel]]:
    return sorted(models, key=lambda model: model.__name__)


def _reachable(components: Mapping[str, Any], names: list[str]) -> set[str]:
    """The components that these refer to, themselves included."""
    found: set[str] = set()
    while names:
        name = names.pop()
        if name not in found:
            found.add(name)
            names += re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(components[name]))
    return found


def _allow_null(schema: dict[str, Any]) -> None:
    """An explicit null means the default, so every optional member of a request takes it."""
    for name, member in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and {"type": "null"} not in member.get(
            "anyOf", ()
        ):
            about = {key: member.pop(key) for key in ("title", "description") if key in member}
            schema["properties"][name] = {**about, "anyOf": [member, {"type": "null"}]}


def _operation(
    operation: Operation, schemas: Mapping[type[BaseModel], dict[str, Any]]
) -> dict[str, Any]:
    content: dict[str, Any] = {operation.media_type: {}}
    if operation.response is not None:
        content = {operation.media_type: {"schema": schemas[operation.response]}}
    if operation.chunk is not None:
        reference = schemas[operation.chunk].get("$ref", "").rpartition("/")[2]
        content["text/event-stream"] = {
            "schema": {
                "description": f"With stream: events whose data are {reference} objects, then "
                "[DONE].",
            }
        }
    item: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "responses": {"200": {"description": "OK", "content": content}},
    }
    parameters = re.findall(r"{(\w+)", operation.path)
    if parameters:
        item["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in parameters
        ]
    statuses = ["401", "500", "503"] + (["404"] if parameters else [])
    if operation.requests:
        bodies = [schemas[model] for model in operation.requests]
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        item["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
        statuses = sorted(ERRORS)
    error = {"application/json": {"schema": schemas[ErrorResponse]}}
    for status in statuses:
        item["responses"][status] = {"description": ERRORS[status], "content": error}
    return item
