"""One run of the HTTP server in this process, and the loop and signals around it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import uvicorn
from starlette.routing import BaseRoute

from octavo.frontend.async_llm import AsyncLLM
from octavo.server.app.app import create_app
from octavo.server.app.http_server import KEEP_ALIVE_S, LAST_WORDS_S, HttpServer
from octavo.server.config import ServiceConfig
from octavo.server.openai.answer import AnswerParsers
from octavo.server.openai.state import ServerState


class Session:
    """Serves an engine on a bound socket. Made in the loop.

    on_loaded: called when loading has ended, well or not; a failure ends the session. make_parsers,
    more_routes, worker: as for `create_app`.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServiceConfig,
        sock: socket.socket,
        api_keys: Mapping[str, str],
        on_loaded: Callable[[ServerState], None],
        *,
        make_parsers: Callable[[], AnswerParsers] = AnswerParsers,
        more_routes: Sequence[BaseRoute] = (),
        worker: int = 0,
    ) -> None:
        self._sock, self._on_loaded = sock, on_loaded
        self._status = 0
        self.clean = True
        """Whether everything stopped in time."""
        self._app = create_app(
            llm,
            config,
            make_parsers=make_parsers,
            api_keys=api_keys,
            on_loaded=self._loaded,
            more_routes=more_routes,
            worker=worker,
        )
        settings = uvicorn.Config(
            self._app,
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            ws="none",
            root_path=config.server.root_path,
            ssl_certfile=config.server.ssl_certfile,
            ssl_keyfile=config.server.ssl_keyfile,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_WORDS_S,
        )
        self.server = HttpServer(settings, self._app, config.server.shutdown_timeout_s)

    async def serve(self) -> int:
        """Until `server.stop`. Returns the exit status: 1 when the engine did not start."""
        await self.server.serve(sockets=[self._sock])
        self.clean = self._app.state.server.clean
        return self._status

    def _loaded(self, state: ServerState) -> None:
        self._on_loaded(state)
        if state.failure is not None:
            self._status = 1
            self.server.stop()


@contextlib.contextmanager
def on_signals(first: Callable[[], None], later: Callable[[], None]) -> Iterator[None]:
    """In the running loop, call `first` at the first SIGINT or SIGTERM and `later` at any other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    calls = iter([first])

    def handle(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(next(calls, later))

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run in uvloop's loop where it is installed."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None
