"""The endpoints that generate, as HTTP sees them: read, check, run, answer or stream."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from octavo.server.app.request_log import log_request
from octavo.server.http.body import parsed, read_body
from octavo.server.http.disconnect import EventStream, until_gone
from octavo.server.http.errors import from_exception
from octavo.server.openai.generation import Generation
from octavo.server.openai.protocol.common import parse
from octavo.server.openai.run import collect, stream
from octavo.server.openai.state import ServerState


class Handler:
    """An endpoint function: one `Generation` of this kind a request."""

    def __init__(self, kind: type[Generation[Any]]) -> None:
        self._kind = kind

    async def handle(self, request: Request) -> Response:
        """Answer one request."""
        state: ServerState = request.app.state.server
        config = state.config.server
        data = await read_body(request, config.max_body_bytes)
        arrived = time.perf_counter()
        kind, refuse = self._kind.request, config.unknown_parameters == "refuse"
        body, ignored = await parsed(
            state.threads, data, lambda found: parse(kind, found, refuse_unknown=refuse)
        )
        state.warn_ignored(ignored)
        headers = {"x-octavo-ignored-parameters": names_header(ignored)} if ignored else {}
        model = state.model_name(body.model)
        body.check(max_n=config.max_n, max_logprobs=config.max_logprobs)
        state.require_ready()
        place = state.queue.enter()
        try:
            generation = self._kind(
                state,
                body,
                model=model,
                client_id=header_id(request),
                key_name=getattr(request.state, "api_key_name", None),
                arrived=arrived,
            )
            await until_gone(request.receive, generation.prepare())
            generation.place = place
            place.settle([len(prompt.token_ids) for prompt in generation.prompts])
            log_request(state.config.observability, generation)
            headers["x-request-id"] = generation.answer_id
            return await _answer(request, generation, headers)
        except ClientDisconnect:
            raise
        except Exception as error:
            raise from_exception(error, body.names) from error
        finally:
            place.leave()


async def _answer(
    request: Request, generation: Generation[Any], headers: Mapping[str, str]
) -> Response:
    if not generation.body.stream:
        answer = await until_gone(request.receive, collect(generation))
        return Response(answer.encode(), media_type="application/json", headers=headers)
    events = stream(generation)
    try:
        first = await until_gone(request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    return EventStream(first, guarded(events, generation), headers)


async def guarded(
    events: AsyncGenerator[bytes, None], generation: Generation[Any]
) -> AsyncGenerator[bytes, None]:
    """An error after the stream has begun becomes an error event, the last one."""
    async with contextlib.aclosing(events):
        try:
            async for piece in events:
                yield piece
        except Exception as error:
            yield generation.error_event(from_exception(error, generation.body.names))


def header_id(request: Request) -> str | None:
    """The client's name for the request in `x-request-id`, if it is fit for one."""
    value = request.headers.get("x-request-id", "")
    fit = 0 < len(value) <= 256 and value.isascii() and value.isprintable() and " " not in value
    return value if fit else None


def names_header(names: Sequence[str]) -> str:
    """Names that a client sent, safe in a header: as many whole ones as fit."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 100]
    text = ", ".join(plain)
    if len(text) > 1000:
        text = text[:1000].rpartition(", ")[0] + ", ..."
    return text or "?"
