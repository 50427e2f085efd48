"""Small endpoints: health, version, load, models, tokenize, detokenize, documentation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

import octavo
from octavo.core.errors import RequestError
from octavo.core.sampling_params import check_token_ids
from octavo.server.app.openapi_page import page
from octavo.server.http.body import parsed, read_body
from octavo.server.http.errors import ApiError, from_exception
from octavo.server.http.large_body import MANY_IDS
from octavo.server.openai.chat import render
from octavo.server.openai.protocol import common
from octavo.server.openai.protocol.common import parse
from octavo.server.openai.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from octavo.server.openai.state import ServerState
from octavo.server.openai.tokens import label

R = TypeVar("R", bound=common.Request)


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def health(request: Request) -> Response:
    """200 when a request can be answered, else 503 with the reason."""
    _state(request).require_ready()
    return JSONResponse({"status": "ok"})


async def version(request: Request) -> Response:
    return JSONResponse({"version": octavo.__version__})


async def load(request: Request) -> Response:
    """Generations under way, in all API processes."""
    return JSONResponse({"server_load": _state(request).metrics.load})


async def metrics(request: Request) -> Response:
    """What Prometheus scrapes."""
    body, content_type = _state(request).metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})


async def timeline(request: Request) -> Response:
    """What happened to a request, event by event: to one that asked for it, or to all with
    `observability.timelines`. The id is that of the answer."""
    state = _state(request)
    state.require_ready()
    request_id: str = request.path_params["request_id"]
    events = await state.llm.timeline(request_id)
    if events is None:
        raise ApiError(
            f"no timeline of request '{request_id}': it is unknown or too old, or "
            "observability.timelines is 0",
            status=404,
            code="not_found",
        )
    return JSONResponse({"id": request_id, "events": events})


async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prompts; the engine does not while requests run."""
    state = _state(request)
    state.require_ready()
    return JSONResponse({"success": await state.llm.reset_prefix_cache()})


async def openapi(request: Request) -> Response:
    """The description, with the path prefix that a proxy strips, if any."""
    root = request.scope.get("root_path", "")
    servers = {"servers": [{"url": root}]} if root else {}
    return JSONResponse(request.app.state.openapi | servers)


async def docs(request: Request) -> Response:
    return HTMLResponse(page(request.app.state.openapi))


async def models(request: Request) -> Response:
    return _json(_state(request).models().encode())


async def model(request: Request) -> Response:
    """One model's card; all of them, like /v1/models, where a slash ends the path."""
    if not request.path_params["model"]:
        return await models(request)
    state = _state(request)
    name = state.model_name(request.path_params["model"])
    card = next(card for card in state.models().data if card.id == name)
    return _json(card.encode())


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    state = _state(request)
    body = await _body(request, _kind_of_prompt)
    state.require_ready()
    try:
        token_ids = await _tokens(state, body)
    except Exception as error:
        raise from_exception(error) from error
    large = len(token_ids) > MANY_IDS
    strings = body.return_token_strs
    return _json(await state.threads.run(large, lambda: _tokenized(state, token_ids, strings)))


def _tokenized(state: ServerState, token_ids: list[int], strings: bool) -> bytes:
    answer = TokenizeResponse(
        count=len(token_ids), max_model_len=state.llm.max_model_len, tokens=token_ids
    )
    if strings:
        token_bytes = state.llm.tokenizer.token_bytes
        answer.token_strs = [label(token_bytes(token)) for token in token_ids]
    return answer.encode()


def _kind_of_prompt(
    data: Mapping[str, Any],
) -> type[TokenizeTextRequest] | type[TokenizeChatRequest]:
    return TokenizeTextRequest if data.get("messages") is None else TokenizeChatRequest


async def _body(request: Request, kind: Callable[[Mapping[str, Any]], type[R]]) -> R:
    """A request for a served model. kind: its class."""
    state = _state(request)
    config = state.config.server
    refuse = config.unknown_parameters == "refuse"
    data = await read_body(request, config.max_body_bytes)
    body, ignored = await parsed(
        state.threads, data, lambda found: parse(kind(found), found, refuse_unknown=refuse)
    )
    state.warn_ignored(ignored)
    state.model_name(body.model)
    return body


async def _tokens(state: ServerState, body: TokenizeTextRequest | TokenizeChatRequest) -> list[int]:
    text = await render(state, body) if isinstance(body, TokenizeChatRequest) else body.prompt
    return await state.encode(text, add_special_tokens=body.add_special_tokens)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    state = _state(request)
    body = await _body(request, lambda _: DetokenizeRequest)
    state.require_ready()
    large = len(body.tokens) > MANY_IDS
    text = await state.threads.run(large, lambda: _text(state, body.tokens))
    return _json(DetokenizeResponse(prompt=text).encode())


def _text(state: ServerState, tokens: Sequence[int]) -> str:
    try:
        check_token_ids("tokens", tokens, state.llm.inputs.vocab_size)
    except RequestError as error:
        raise from_exception(error) from None
    return state.llm.tokenizer.decode(tokens, skip_special_tokens=False)
