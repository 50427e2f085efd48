"""Route plugin `example`: `GET /example`, which says what is served and counts its visitors."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from octavo.core.contracts import Options
from octavo.server.contracts.route import RouteContext, RoutePlugin


class ExampleOptions(Options):
    """Where it is found."""

    path: str = Field(default="/example", pattern="^/.+", description="Path of the route.")


class ExampleRoutes(RoutePlugin):
    """One route."""

    def __init__(self, options: ExampleOptions, context: RouteContext) -> None:
        self._path, self._models = options.path, context.model_names
        self._visits = 0

    def routes(self) -> Sequence[BaseRoute]:
        return [Route(self._path, self.answer, methods=["GET"])]

    async def answer(self, request: Request) -> JSONResponse:
        """Names of the models that are served, and how often this was asked."""
        self._visits += 1
        return JSONResponse({"models": list(self._models), "visits": self._visits})
