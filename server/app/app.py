"""`create_app`: the ASGI application. Its lifespan owns all state; the module has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

import octavo
from octavo.frontend.async_llm import AsyncLLM
from octavo.server.app.dashboard.viewer import Viewer
from octavo.server.app.openapi import document
from octavo.server.app.plugin_routes import described
from octavo.server.app.routes import OPERATIONS, Operation
from octavo.server.config import ServerConfig, ServiceConfig
from octavo.server.http.errors import ApiError, from_exception
from octavo.server.http.guard import Guard
from octavo.server.http.security import OPEN_PATHS, ApiKeys
from octavo.server.openai.answer import AnswerParsers
from octavo.server.openai.state import ServerState


def create_app(
    llm: AsyncLLM,
    config: ServiceConfig,
    *,
    make_parsers: Callable[[], AnswerParsers] = AnswerParsers,
    api_keys: Mapping[str, str] | None = None,
    on_loaded: Callable[[ServerState], None] | None = None,
    more_routes: Sequence[BaseRoute] = (),
    worker: int = 0,
) -> Starlette:
    """The application over an engine that has not been started: the lifespan starts it in the
    background (until then /health answers 503) and shuts it down.

    `app.state.server` is the `ServerState`. make_parsers: called once the engine has started, for
    the parsers that answers go through. api_keys: name to key (see `security.load_keys`); when
    there is any, every route but `security.OPEN_PATHS` wants one. on_loaded is called when loading
    has ended, well or not (`ServerState.failure`). more_routes: of plugins. worker: number of this
    API process among several.
    """

    async def load(state: ServerState) -> None:
        await state.start()
        if on_loaded is not None:
            on_loaded(state)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state = ServerState(llm, config, make_parsers, worker)
        app.state.server, app.state.viewer = state, Viewer()
        app.state.openapi = document(
            OPERATIONS,
            octavo.__version__,
            keys=bool(api_keys),
            open_paths=OPEN_PATHS,
            more=described(more_routes),
        )
        loading = asyncio.create_task(load(state))
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await state.stop()

    return Starlette(
        routes=[*routes(), *more_routes],
        lifespan=lifespan,
        exception_handlers={
            ApiError: _refuse,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
        },
        middleware=_middleware(config.server, api_keys or {}),
    )


def _middleware(config: ServerConfig, api_keys: Mapping[str, str]) -> list[Middleware]:
    """Outermost first."""
    layers = []
    if config.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["*"],
            )
        )
    layers.append(Middleware(Guard))
    if api_keys:
        layers.append(Middleware(ApiKeys, keys=api_keys))
    return layers


def routes() -> list[Route]:
    """Every route of the server; the methods of one path are one route, so that a wrong one is
    answered 405 with all the right ones."""
    by_path: dict[str, dict[str, Operation]] = {}
    for operation in OPERATIONS:
        by_path.setdefault(operation.path, {})[operation.method] = operation
    return [
        Route(path, next(iter(found.values())).handler, methods=list(found))
        for path, found in by_path.items()
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    refusal = from_exception(error)
    return JSONResponse(refusal.body(), status_code=refusal.status, headers=refusal.headers)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, as error objects."""
    assert isinstance(error, HTTPException), "registered for HTTPException"
    path = request.url.path
    what = f"{request.method} {path}"
    messages = {404: f"no such route: {what}{_meant(path)}", 405: f"method not allowed: {what}"}
    refusal = ApiError(
        messages.get(error.status_code, error.detail),
        status=error.status_code,
        code={404: "not_found", 405: "method_not_allowed"}.get(error.status_code),
        headers=error.headers,
    )
    return await _refuse(request, refusal)


def _meant(path: str) -> str:
    """A hint, where only the `/v1` of a client's base URL is missing or there twice."""
    for other in (f"/v1{path}", path.removeprefix("/v1")):
        if any(operation.path == other for operation in OPERATIONS):
            return f"; there is {other}"
    return ""


async def _client_gone(request: Request, error: Exception) -> Response:
    """Nobody reads this; 499 is what proxies log for it."""
    return Response(status_code=499)
