"""`GET /server_info`: what runs here, for people who look after many servers."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from octavo.core.contracts import NoOptions
from octavo.server.contracts.route import RouteContext, RoutePlugin


class ServerInfo(RoutePlugin):
    """One route."""

    def __init__(self, options: NoOptions, context: RouteContext) -> None:
        self._context = context

    def routes(self) -> Sequence[BaseRoute]:
        return [Route("/server_info", self._info, methods=["GET"])]

    async def _info(self, request: Request) -> Response:
        """Configuration (secrets hidden), startup report and the engine's metrics."""
        engine = self._context.engine
        await engine.check_health()
        report = engine.report
        return JSONResponse(
            {
                "models": list(self._context.model_names),
                "config": self._context.config,
                "report": None if report is None else report.as_dict(),
                "metrics": await engine.metrics(),
            }
        )
