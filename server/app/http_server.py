"""uvicorn's server with another end: running requests may finish, new ones are refused, and a
signal is neither raised once more nor leaves a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from octavo.server.openai.state import ServerState

KEEP_ALIVE_S = 65
"""Longer than the 60 s after which common proxies drop an idle connection, so that they do it
first."""

LAST_WORDS_S = 5
"""Seconds that aborted requests get to send their error."""

TICK_S = 1.0
"""How often an idle server wakes up, to renew the Date header."""


class HttpServer(uvicorn.Server):
    """Signals are the caller's to handle: the first one calls `stop`, the next one `hurry`."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain_s: float) -> None:
        super().__init__(config)
        self._app, self._drain_s = app, drain_s
        self._changed = asyncio.Event()
        self._hurried = False

    def stop(self) -> None:
        """Begin to end, in the loop."""
        self.should_exit = True
        self._changed.set()

    def hurry(self) -> None:
        """Wait for no request any longer."""
        self._hurried = True
        self.stop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        yield

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), TICK_S)

    async def shutdown(self, sockets: object = None) -> None:
        state: ServerState = self._app.state.server
        state.draining = True
        if state.in_flight:
            say(f"stopping: {state.in_flight} requests may finish within {self._drain_s:g} s")
        deadline = time.monotonic() + self._drain_s
        while state.in_flight and time.monotonic() < deadline and not self._hurried:
            await asyncio.sleep(0.02)
        await state.interrupt()
        await super().shutdown(sockets)  # type: ignore[arg-type]


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)
