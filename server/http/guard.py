"""The outermost middleware: whatever goes wrong inside becomes a 500 with an error object."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.errors import from_exception


class Guard:
    """An exception before the answer began is answered and logged; one after it has begun is
    logged, and ends the connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            refusal = from_exception(error)
            if begun:
                raise
            response = JSONResponse(
                refusal.body(), status_code=refusal.status, headers=refusal.headers
            )
            await response(scope, receive, send)
