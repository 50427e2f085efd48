"""Kind `route`: more paths of the HTTP server.

A route plugin runs in the API process (in each, with `server.api_workers`), never in the engine's.
Its routes stand behind the server's own middleware: they require an API key if keys are configured;
what their handlers raise becomes an error object (`RequestError` a 400, `EngineDeadError` a 503,
anything else a 500); `/openapi.json` lists them. The server's own paths cannot be taken.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

    from octavo.frontend.async_llm import AsyncLLM


@dataclass(frozen=True)
class RouteContext:
    """engine: takes requests once it has started; handlers may use it, the factory may not.
    config: the configuration as YAML would give it, with secrets hidden. model_names: those that
    are served."""

    engine: AsyncLLM
    config: dict[str, Any] = field(default_factory=dict)
    model_names: tuple[str, ...] = ()


class RoutePlugin(ABC):
    """Offers Starlette routes."""

    @abstractmethod
    def routes(self) -> Sequence[BaseRoute]:
        """Starlette's `Route` and `Mount` objects; called once, before the server listens. Their
        handlers run on the event loop: work that takes longer than a millisecond belongs into a
        thread. A handler's docstring is its description in `/openapi.json`."""


class Spec:
    @hookspec
    def octavo_routes(self) -> list[Provider[RoutePlugin]]:  # type: ignore[empty-body]
        """Providers of route plugins.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `RouteContext`.
        """


KIND = Kind("route", Spec, RoutePlugin, RouteContext, "routes")
