"""Every operation of the server: path, handler, and the models that describe it to clients."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from octavo.server.app import utility
from octavo.server.app.dashboard.data import data
from octavo.server.app.dashboard.page import page
from octavo.server.app.endpoint import Handler
from octavo.server.openai.chat import ChatGeneration
from octavo.server.openai.completions import CompletionGeneration
from octavo.server.openai.protocol import chat, common, completions, responses, tokens
from octavo.server.openai.responses import ResponseGeneration


@dataclass(frozen=True)
class Operation:
    """requests: models of the body, any one of them. response: model of a 200. chunk: model of the
    events of a stream. The handler's docstring, or `summary`, is its description."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    summary: str
    requests: tuple[type[common.Request], ...] = ()
    response: type[BaseModel] | None = None
    chunk: type[BaseModel] | None = None
    media_type: str = "application/json"

    @property
    def name(self) -> str:
        """A unique name: `post_v1_completions`."""
        words = self.path.replace("{", "").replace("}", "").replace(":path", "")
        return (self.method.lower() + words).replace("/", "_")


OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/v1/chat/completions",
        Handler(ChatGeneration).handle,
        "Answer a conversation.",
        (chat.ChatRequest,),
        chat.ChatResponse,
        chat.ChatChunk,
    ),
    Operation(
        "POST",
        "/v1/responses",
        Handler(ResponseGeneration).handle,
        "Answer items, with OpenAI's newer protocol; nothing is stored.",
        (responses.ResponsesRequest,),
        responses.ResponsesAnswer,
        responses.ResponsesEvent,
    ),
    Operation(
        "POST",
        "/v1/completions",
        Handler(CompletionGeneration).handle,
        "Continue prompts.",
        (completions.CompletionRequest,),
        completions.CompletionResponse,
        completions.CompletionResponse,
    ),
    Operation(
        "GET", "/v1/models", utility.models, "List the served models.", response=common.ModelList
    ),
    Operation(
        "GET",
        "/v1/models/{model:path}",
        utility.model,
        "One served name.",
        response=common.ModelCard,
    ),
    Operation(
        "POST",
        "/tokenize",
        utility.tokenize,
        "Token ids of a text or of a conversation.",
        (tokens.TokenizeTextRequest, tokens.TokenizeChatRequest),
        tokens.TokenizeResponse,
    ),
    Operation(
        "POST",
        "/detokenize",
        utility.detokenize,
        "Text of token ids, special tokens included.",
        (tokens.DetokenizeRequest,),
        tokens.DetokenizeResponse,
    ),
    Operation(
        "GET",
        "/health",
        utility.health,
        "200 when a request would be answered now, else 503 with the reason.",
        response=common.Health,
    ),
    Operation("GET", "/ping", utility.health, "The same as /health.", response=common.Health),
    Operation("POST", "/ping", utility.health, "The same as /health.", response=common.Health),
    Operation("GET", "/load", utility.load, "Generations in progress.", response=common.Load),
    Operation(
        "GET",
        "/metrics",
        utility.metrics,
        "Metrics for Prometheus (docs/metrics.md).",
        media_type="text/plain",
    ),
    Operation("GET", "/version", utility.version, "Octavo's version.", response=common.Version),
    Operation(
        "POST",
        "/reset_prefix_cache",
        utility.reset_prefix_cache,
        "Forget cached prompts; not done while requests run.",
        response=common.Reset,
    ),
    Operation(
        "GET",
        "/debug/requests/{request_id}",
        utility.timeline,
        "What happened to a request, event by event (docs/timelines.md).",
        response=common.Timeline,
    ),
    Operation(
        "GET",
        "/dashboard",
        page,
        "A page that shows the running engine (docs/metrics.md).",
        media_type="text/html",
    ),
    Operation("GET", "/dashboard/data", data, "What that page shows."),
    Operation("GET", "/openapi.json", utility.openapi, "This document."),
    Operation("GET", "/docs", utility.docs, "This document as a page.", media_type="text/html"),
)
