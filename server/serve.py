"""`octavo serve`: bind, load the engine behind a server that already answers, serve, stop.

Exit status: 0 after SIGINT or SIGTERM, 1 when the engine did not start, 2 when the address cannot
be bound or certificate or keys cannot be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

import uvicorn
from starlette.applications import Starlette

import octavo
from octavo.core.config.models import EngineConfig
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.registry import Registry
from octavo.server.app import create_app
from octavo.server.engine import Engine
from octavo.server.listen import address_of, bind, bind_problem, check_certificate
from octavo.server.security import load_keys
from octavo.server.state import ServerState

KEEP_ALIVE_S = 65
"""Longer than the 60 s after which common proxies drop an idle connection, so that they do it
first."""

LAST_WORDS_S = 5
"""Seconds that aborted requests get to send their error."""


def run(config: EngineConfig, registry: Registry) -> int:
    """Serve until a signal comes. Blocks; returns the exit status."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        with _exit_on_signal():
            try:
                check_certificate(config.server)
                keys = load_keys(config.server)
                sock = bind(config.server)
            except ConfigError as error:
                _say(f"error: {error}")
                return 2
            except OSError as error:
                _say(f"error: {bind_problem(error, config.server)}")
                return 2
            with sock:
                return _run(sock, config, registry, keys)
    except (KeyboardInterrupt, SystemExit):
        return 0


def _run(
    sock: socket.socket, config: EngineConfig, registry: Registry, keys: Mapping[str, str]
) -> int:
    from octavo.core.async_llm import AsyncLLM
    from octavo.core.config.resolve import resolve

    _say(f"Octavo {octavo.__version__}: loading {config.model.source}")
    try:
        resolved = resolve(config, registry)
    except OctavoError as error:
        _say(f"error: {error}")
        return 1
    llm = AsyncLLM.from_resolved(resolved, registry, progress=_say)
    return serve(llm, resolved.config, sock, keys)


def serve(
    llm: Engine,
    config: EngineConfig,
    sock: socket.socket,
    api_keys: Mapping[str, str] | None = None,
) -> int:
    """Serve this engine on a bound socket; returns the exit status."""
    session = _Session(llm, config, sock, api_keys or {})
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        status = runner.run(session.serve())
        if not session.clean:  # a thread of the engine still works: it must not hold up the exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return status


class _Session:
    """One run of the server. clean: whether everything stopped in time."""

    def __init__(
        self,
        llm: Engine,
        config: EngineConfig,
        sock: socket.socket,
        api_keys: Mapping[str, str],
    ) -> None:
        self._llm, self._sock, self._path = llm, sock, config.server.uds
        self._status = 0
        self.clean = True
        self._app = create_app(llm, config, api_keys=api_keys, on_loaded=self._loaded)
        scheme = "https" if config.server.ssl_certfile else "http"
        self._url = address_of(sock, scheme)
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
        self._server = _Server(settings, self._app, config.server.shutdown_timeout_s)

    async def serve(self) -> int:
        _say(f"listening on {self._url}; /health answers 503 until the engine is ready")
        try:
            await self._server.serve(sockets=[self._sock])
        finally:
            if self._path is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)
        self.clean = self._app.state.server.clean
        return self._status

    def _loaded(self, state: ServerState) -> None:
        """Loading has ended, well or not."""
        if state.failure is not None:
            _say(f"error: the engine did not start: {_one_line(state.failure)}")
            self._status = 1
            self._server.should_exit = True
            return
        report = getattr(self._llm, "report", None)
        for line in report.lines() if report is not None else ():
            print(line)
        names = ", ".join(state.names)
        print(f"Serving model {names} with {state.llm.max_model_len} tokens of context")
        print(f"Octavo is ready on {self._url}", flush=True)


class _Server(uvicorn.Server):
    """uvicorn's server with another end: running requests may finish, new ones are refused, and a
    signal is not raised once more."""

    def __init__(self, config: uvicorn.Config, app: Starlette, drain_s: float) -> None:
        super().__init__(config)
        self._app, self._drain_s = app, drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state: ServerState = self._app.state.server
        state.draining = True
        if state.in_flight:
            _say(f"stopping: {state.in_flight} requests may finish within {self._drain_s:g} s")
        deadline = time.monotonic() + self._drain_s
        while state.in_flight and time.monotonic() < deadline and not self.force_exit:
            await asyncio.sleep(0.02)
        await state.interrupt()
        await super().shutdown(sockets)
        _say("stopped")


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
        return factory
    return None


@contextlib.contextmanager
def _exit_on_signal() -> Iterator[None]:
    """SIGTERM ends the program in good order also before the event loop handles signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(sig: int, frame: FrameType | None) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
