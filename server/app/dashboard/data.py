"""The endpoint that feeds the page."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from octavo.server.openai.state import ServerState


async def data(request: Request) -> Response:
    """All that `/dashboard` shows: state, totals since the start, KV blocks and requests."""
    state: ServerState = request.app.state.server
    answer = await request.app.state.viewer.look(state)
    return JSONResponse(answer, headers={"cache-control": "no-store"})
