"""`octavo serve`: bind, load the engine behind a server that already answers, serve, stop.

Exit status: 0 after SIGINT or SIGTERM, 1 when the engine did not start, 2 when the address cannot
be bound or certificate or keys cannot be used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any

from starlette.routing import BaseRoute

import octavo
from octavo.core.errors import ConfigError, OctavoError
from octavo.core.registry import Registry
from octavo.engine.process.process import EngineProcess
from octavo.frontend.async_engine import Parts
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.process_client import parts
from octavo.plugins.observers.prometheus.board import Board
from octavo.server.app.http_server import say
from octavo.server.app.plugin_routes import plugin_routes
from octavo.server.config import ServiceConfig
from octavo.server.http.security import load_keys
from octavo.server.openai.answer import AnswerParsers, make_parsers
from octavo.server.openai.state import ServerState, served_names
from octavo.server.operations.metrics import with_board
from octavo.server.operations.stats_log import logged_stats
from octavo.server.process.control import Loaded
from octavo.server.process.listen import (
    address_of,
    bind,
    bind_problem,
    check_certificate,
    check_files,
)
from octavo.server.process.notify import READY, STOPPING, notify
from octavo.server.process.session import Session, on_signals, run_loop
from octavo.server.process.supervisor import Supervisor


def run(config: ServiceConfig, registry: Registry) -> int:
    """Serve until a signal comes. Blocks; returns the exit status."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        with _exit_on_signal():
            try:
                check_files()
                check_certificate(config.server)
                keys = load_keys(config.server)
                sock = bind(config.server)
            except ConfigError as error:
                say(f"error: {error}")
                return 2
            except OSError as error:
                say(f"error: {bind_problem(error, config.server)}")
                return 2
            with sock, Board.create(config.server.api_workers) as board:
                return _run(sock, with_board(config, board), registry, keys, board)
    except OctavoError as error:
        say(f"error: {error}")
        return 1
    except (KeyboardInterrupt, SystemExit):
        return 0


def _run(
    sock: socket.socket,
    config: ServiceConfig,
    registry: Registry,
    keys: Mapping[str, str],
    board: Board,
) -> int:
    say(f"Octavo {octavo.__version__}: loading {config.model.source}")
    if config.server.api_workers > 1:
        with _unlinked(config):
            return run_loop(_serve_several(config, sock, keys, board))
    return _serve_one(config, registry, sock, keys, board)


def _serve_one(
    config: ServiceConfig,
    registry: Registry,
    sock: socket.socket,
    keys: Mapping[str, str],
    board: Board,
) -> int:
    async def make() -> Parts:
        return await parts(_engine(config, board), registry)

    llm = AsyncLLM.from_parts(make)
    more = plugin_routes(config, registry, llm, served_names(config))
    return serve(
        llm,
        config,
        sock,
        keys,
        make_parsers=partial(make_parsers, config, registry),
        more_routes=more,
        board=board,
    )


async def _serve_several(
    config: ServiceConfig, sock: socket.socket, keys: Mapping[str, str], board: Board
) -> int:
    engine = _engine(config, board)
    url = address_of(sock, _scheme(config))

    def ready(loaded: Loaded) -> None:
        say(f"{config.server.api_workers} API processes share the engine")
        _announce(engine.report, loaded.names, loaded.max_model_len, url)

    sock.listen(2048)
    say(f"listening on {url}; /health answers 503 until the engine is ready")
    supervisor = Supervisor(config, sock, keys, engine, ready, board=board)
    with on_signals(_telling(supervisor.stop), supervisor.hurry):
        try:
            async with logged_stats(board, config):
                await supervisor.serve()
        except Exception as error:
            say(f"error: the engine did not start: {_one_line(error)}")
            return 1
    say("stopped")
    return 0


def _engine(config: ServiceConfig, board: Board) -> EngineProcess:
    server = config.server
    assert board.fd is not None, "memory that can be handed down"
    return EngineProcess(
        config,
        timeout_s=server.engine_timeout_s,
        restarts=server.max_engine_restarts if server.restart_engine else 0,
        progress=say,
        pass_fds=(board.fd,),
    )


def serve(
    llm: AsyncLLM,
    config: ServiceConfig,
    sock: socket.socket,
    api_keys: Mapping[str, str] | None = None,
    *,
    make_parsers: Callable[[], AnswerParsers] = AnswerParsers,
    more_routes: Sequence[BaseRoute] = (),
    board: Board | None = None,
) -> int:
    """Serve this engine on a bound socket; returns the exit status. board: the one that `config`
    names, of which statistics are logged."""
    url = address_of(sock, _scheme(config))

    def loaded(state: ServerState) -> None:
        if state.failure is not None:
            say(f"error: the engine did not start: {_one_line(state.failure)}")
        else:
            report = getattr(llm, "report", None)
            _announce(report, state.names, state.llm.max_model_len, url)

    async def main() -> int:
        session = Session(
            llm,
            config,
            sock,
            api_keys or {},
            loaded,
            make_parsers=make_parsers,
            more_routes=more_routes,
        )
        say(f"listening on {url}; /health answers 503 until the engine is ready")
        first = _telling(session.server.stop)
        stats = contextlib.nullcontext() if board is None else logged_stats(board, config)
        with _unlinked(config), on_signals(first, session.server.hurry):
            async with stats:
                status = await session.serve()
        if status == 0:
            say("stopped")
        if not session.clean:  # a thread of the engine still works: it must not hold up the exit
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        return status

    return run_loop(main())


def _telling(stop: Callable[[], None]) -> Callable[[], None]:
    """`stop`, and the service manager hears of it."""

    def tell_and_stop() -> None:
        notify(STOPPING)
        stop()

    return tell_and_stop


@contextlib.contextmanager
def _unlinked(config: ServiceConfig) -> Iterator[None]:
    """Remove the Unix socket that is served, at the end."""
    try:
        yield
    finally:
        if config.server.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(config.server.uds)


def _announce(report: Any, names: Sequence[str], max_model_len: int, url: str) -> None:
    for line in report.lines() if report is not None else ():
        print(line)
    context = f"{max_model_len} tokens of context"
    held = getattr(report, "max_sequence_tokens", max_model_len)
    if held < max_model_len:
        context += f", of which the KV cache holds {held}"
    print(f"Serving model {', '.join(names)} with {context}")
    if not url.startswith("unix:"):
        print(f"What it does, live, and a chat: {url}/dashboard")
    print(f"Octavo is ready on {url}", flush=True)
    notify(f"{READY}\nSTATUS=serving {', '.join(names)} on {url}")


def _scheme(config: ServiceConfig) -> str:
    return "https" if config.server.ssl_certfile else "http"


def _one_line(error: BaseException) -> str:
    text = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


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
