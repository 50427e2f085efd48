"""Read and parse a JSON body; what is not JSON is refused with a message that says where."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, NoReturn, TypeVar

import msgspec
from starlette.requests import Request

from octavo.server.http.errors import ApiError
from octavo.server.http.large_body import LARGE, Threads, decode_large

T = TypeVar("T")

DISCARDED_BYTES, DISCARDED_S = 256 * 2**20, 30.0
"""What is read of a body that is too large: so much, for so many seconds."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, not parsed yet.

    Raises `ApiError`: 413 over `max_bytes`, 415 for another content type or a compressed body.
    """
    _check_type(request)
    return await _read(request, max_bytes)


async def parsed(threads: Threads, data: bytes, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` makes of a body, which must be one JSON object. A large one holds up nobody
    else.

    Raises `ApiError` 400 for anything else (NaN, lone surrogates and deep nesting included).
    """
    return await threads.if_large(len(data) >= LARGE, lambda: parse(parse_object(data)))


def _check_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    media = content_type.partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(
            f"the content type must be application/json, got {media or 'nothing'}",
            status=415,
            code="unsupported_media_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(
            f"a body with content encoding {encoding} is not accepted",
            status=415,
            code="unsupported_content_encoding",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() else 0
    if size > max_bytes:
        if "expect" not in request.headers:  # who asks first has sent nothing yet
            await _discard(request.stream(), size)
        raise _too_large(size, max_bytes)
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    async for chunk in stream:
        size += len(chunk)
        if size > max_bytes:
            chunks.clear()
            await _discard(stream, size)
            raise _too_large(size, max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def _discard(stream: AsyncIterator[bytes], size: int) -> None:
    """Read on, within bounds: most clients look for an answer only when they have sent all, and a
    connection that is closed before loses it."""
    left = DISCARDED_BYTES
    if size > left:
        return
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARDED_S):
            async for chunk in stream:
                left -= len(chunk)
                if left < 0:
                    return


def _too_large(size: int, max_bytes: int) -> ApiError:
    return ApiError(
        f"the body has {size} bytes or more, at most {max_bytes} are accepted "
        "(server.max_body_bytes)",
        status=413,
        code="request_too_large",
        headers={"connection": "close"},
    )


def parse_object(data: bytes) -> dict[str, Any]:
    """Parse strict JSON whose top level is an object."""
    if not data.strip():
        raise _bad("the body is empty, expected a JSON object")
    large = len(data) >= LARGE
    try:
        value = decode_large(data) if large else msgspec.json.decode(data)
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except (msgspec.MsgspecError, ValueError) as error:
        if large:
            _explain_large(data, error)
        _explain(data)
    if not isinstance(value, dict):
        raise _bad(f"the body must be a JSON object, got {_json_type(value)}")
    return value


def _explain_large(data: bytes, error: Exception) -> NoReturn:
    """Say why parsing failed without parsing again, which would take long."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as wrong:
        raise _bad(f"the body is not valid UTF-8 at byte {wrong.start}") from None
    if str(error).startswith("Expected `object`"):
        raise _bad("the body must be a JSON object")
    reason = str(error).removeprefix("JSON is malformed: ")
    raise _bad(f"the body is not valid JSON: {reason}")


def _explain(data: bytes) -> NoReturn:
    """Say with line and column why strict parsing failed; the standard library knows both."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _bad(f"the body is not valid UTF-8 at byte {error.start}") from None
    try:
        json.loads(text, parse_constant=_refuse_constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno} (character {error.pos})"
        reason = error.msg.partition(" (decode using")[0]  # advice for Python's callers
        raise _bad(f"the body is not valid JSON: {reason} at {where}") from None
    except RecursionError:
        raise _bad("the body is nested too deeply") from None
    except ValueError as error:
        raise _bad(f"the body is not valid JSON: {error}") from None
    raise _bad(
        "the body is not valid JSON: it has a lone surrogate (an unpaired \\ud800 to \\udfff) or "
        "a number out of range"
    )


def _integer(digits: str) -> int:
    if len(digits) > 1000:
        raise ValueError(f"a number of {len(digits)} digits is out of range")
    return int(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _bad(message: str) -> ApiError:
    return ApiError(message, code="invalid_json")


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    named = {list: "an array", str: "a string", bool: "a boolean"}
    return named.get(type(value), "a number")
