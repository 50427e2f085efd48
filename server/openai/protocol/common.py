"""Bases of all requests and responses, and `parse`: a JSON object to a request.

A request class may declare `unsupported`: parameters that OpenAI or vLLM know and this server does
not have. They are refused by name unless the value asks for nothing (`inert`). `hints` are those
that no answer depends on: they are taken and have no effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from octavo.core.errors import nearest
from octavo.server.http.errors import ApiError

R = TypeVar("R", bound="Request")

MAX_SHOWN = 80
"""Longest piece of a client's value that is repeated in an error message."""


class Unsupported(NamedTuple):
    """why: what the message adds. inert: values that ask for nothing and are accepted."""

    why: str = ""
    inert: tuple[Any, ...] = ()


class Part(BaseModel):
    """Base of everything inside a request: strict types, an explicit null means the default."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {key: value for key, value in data.items() if value is not None}
        return data


class Request(Part):
    """Base of all request bodies."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {}
    hints: ClassVar[frozenset[str]] = frozenset()

    model: str | None = Field(
        default=None, description="A served model's name; absent: the first one."
    )


class Response(BaseModel):
    """Base of all responses. Only fields that were set are sent, so that an absent one differs
    from a null one."""

    model_config = ConfigDict(protected_namespaces=())

    def encode(self) -> bytes:
        """JSON in UTF-8. An infinite number becomes null: clamp logprobs before."""
        return self.__pydantic_serializer__.to_json(self, exclude_unset=True)


class PromptTokensDetails(Response):
    cached_tokens: int = Field(description="Prompt tokens whose KV was found in the prefix cache.")


class Usage(Response):
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class ErrorDetail(Response):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Response):
    """OpenAI's error object: every answer with status 400 or more."""

    error: ErrorDetail


class ModelCard(Response):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(Response):
    object: Literal["list"]
    data: list[ModelCard]


class Health(Response):
    status: Literal["ok"]


class Version(Response):
    version: str


class Load(Response):
    server_load: int


class Reset(Response):
    success: bool


class Timeline(Response):
    id: str
    events: list[dict[str, Any]] = Field(
        description="By time, each with `at` (seconds on the engine's clock), `index` (of the "
        "choice), `event`, and what belongs to it."
    )


class StreamOptions(Part):
    include_usage: bool = Field(
        default=False, description="One last chunk with `usage` and no choices."
    )
    continuous_usage_stats: bool = Field(
        default=False, description="Usage so far in every chunk; needs include_usage."
    )


def parse(cls: type[R], data: Mapping[str, Any], *, refuse_unknown: bool) -> tuple[R, list[str]]:
    """A request from a JSON object, and the unknown parameters that were ignored.

    Raises `ApiError` 400 that names the parameter.
    """
    _refuse_unsupported(cls, data)
    known = cls.model_fields
    declared = cls.unsupported.keys() | cls.hints | known.keys()
    unknown = [name for name in data if name not in declared]
    if unknown and refuse_unknown:
        hint = nearest(unknown[0], known)
        raise ApiError(
            f"unknown parameter {shown(unknown[0])}: {hint}",
            param=unknown[0],
            code="unknown_parameter",
        )
    try:
        return cls.model_validate(data), unknown
    except ValidationError as error:
        raise validation_error(error) from None


def _refuse_unsupported(cls: type[Request], data: Mapping[str, Any]) -> None:
    for name, (why, inert) in cls.unsupported.items():
        value = data.get(name)
        if value is None or any(value == item and type(value) is type(item) for item in inert):
            continue
        accepted = f" (accepted: {', '.join(map(shown, inert))})" if inert else ""
        raise ApiError(
            f"parameter '{name}' is not supported by this server{': ' * bool(why)}{why}{accepted}",
            param=name,
            code="unsupported_parameter",
        )


_CODES = {
    "missing": "missing_required_parameter",
    "greater_than": "value_below_minimum",
    "greater_than_equal": "value_below_minimum",
    "less_than": "value_above_maximum",
    "less_than_equal": "value_above_maximum",
    "too_short": "array_below_min_length",
    "too_long": "array_above_max_length",
    "string_too_short": "string_below_min_length",
}


def validation_error(error: ValidationError) -> ApiError:
    """The first thing that pydantic found wrong, as an `ApiError`."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ""
    for step in first["loc"]:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step.isidentifier():
            param += f".{step}" if param else step
    kind = first["type"]
    code = _CODES.get(kind, "invalid_type" if kind.endswith("_type") else "invalid_value")
    message = first["msg"].removeprefix("Value error, ")
    if kind == "missing":
        return ApiError(f"missing required parameter: '{param}'", param=param, code=code)
    value = "" if kind == "value_error" else f", got {shown(first['input'])}"
    return ApiError(f"{param}: {message}{value}", param=param, code=code)


def shown(value: Any) -> str:
    """A value as it may appear in an error message: short, whatever the client sent."""
    if value is None or isinstance(value, bool) or value == {}:
        return json.dumps(value)
    if isinstance(value, dict):
        return f"an object of {len(value)} members"
    if isinstance(value, list) and len(value) > 8:
        return f"an array of {len(value)} items"
    text = ascii(value[: MAX_SHOWN + 1]) if isinstance(value, str) else repr(value)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
