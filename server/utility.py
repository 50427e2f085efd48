"""Small endpoints: models, health, version, load, tokenize, detokenize."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import octavo
from octavo.server.body import read_json
from octavo.server.chat import render
from octavo.server.errors import ApiError, from_exception
from octavo.server.generation import Prompt
from octavo.server.protocol.common import parse, shown
from octavo.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from octavo.server.state import ServerState
from octavo.server.tokens import label


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


async def health(request: Request) -> Response:
    """200 when a request can be answered, else 503 with the reason."""
    _state(request).require_ready()
    return JSONResponse({"status": "ok"})


async def ping(request: Request) -> Response:
    """The same as /health, under the name that some load balancers ask for."""
    return await health(request)


async def version(request: Request) -> Response:
    return JSONResponse({"version": octavo.__version__})


async def load(request: Request) -> Response:
    """Generations under way."""
    return JSONResponse({"server_load": _state(request).in_flight})


async def models(request: Request) -> Response:
    return _json(_state(request).models().encode())


async def model(request: Request) -> Response:
    """One model's card."""
    state = _state(request)
    name = state.model_name(request.path_params["model"])
    card = next(card for card in state.models().data if card.id == name)
    return _json(card.encode())


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    state = _state(request)
    config = state.config.server
    data = await read_json(request, config.max_body_bytes)
    cls = TokenizeChatRequest if data.get("messages") is not None else TokenizeTextRequest
    refuse = config.unknown_parameters == "refuse"
    body, ignored = parse(cls, data, refuse_unknown=refuse)
    state.warn_ignored(ignored)
    state.model_name(body.model)
    state.require_ready()
    try:
        prompt = await _tokens(state, body)
    except Exception as error:
        raise from_exception(error) from error
    answer = TokenizeResponse(
        count=len(prompt.token_ids),
        max_model_len=state.llm.max_model_len,
        tokens=prompt.token_ids,
    )
    if body.return_token_strs:
        tokenizer = state.llm.tokenizer
        answer.token_strs = [label(tokenizer.token_bytes(token)) for token in prompt.token_ids]
    return _json(answer.encode())


async def _tokens(state: ServerState, body: TokenizeTextRequest | TokenizeChatRequest) -> Prompt:
    if isinstance(body, TokenizeChatRequest):
        return await render(state, body)
    text, special = body.prompt, body.add_special_tokens
    return Prompt(await state.in_thread(lambda: state.llm.tokenize(text, special)), text)


async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    state = _state(request)
    config = state.config.server
    data = await read_json(request, config.max_body_bytes)
    refuse = config.unknown_parameters == "refuse"
    body, ignored = parse(DetokenizeRequest, data, refuse_unknown=refuse)
    state.warn_ignored(ignored)
    state.model_name(body.model)
    state.require_ready()
    top = state.llm.vocab_size - 1
    wrong = next((token for token in body.tokens if not 0 <= token <= top), None)
    if wrong is not None:
        raise ApiError(
            f"tokens has token id {shown(wrong)}, expected 0 to {top}",
            param="tokens",
            code="invalid_value",
        )
    tokenizer = state.llm.tokenizer
    text = await state.in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False))
    return _json(DetokenizeResponse(prompt=text).encode())
