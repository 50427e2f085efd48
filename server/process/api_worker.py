"""`python -m octavo.server.process.api_worker CONTROL PARENT LISTENER`.

Started by the supervisor with two inherited sockets: its end of the control connection, and the
one on which all API processes accept. The engine process is the supervisor's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from functools import partial
from typing import Any

from octavo.core.registry import Registry
from octavo.engine.process.link import EngineLink
from octavo.engine.process.wire import Settled
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.config import load_config
from octavo.frontend.process_client import parts
from octavo.kernels.child_process import end_with_parent
from octavo.server.app.plugin_routes import plugin_routes
from octavo.server.config import service_config
from octavo.server.openai.answer import make_parsers
from octavo.server.openai.state import ServerState, served_names
from octavo.server.process import control
from octavo.server.process.session import Session, on_signals, run_loop


class SupervisedEngine(EngineLink):
    """An engine of which the supervisor tells."""

    def launch(self) -> None:
        """It is launched already."""

    def close(self) -> None:
        """It is the supervisor's to end."""

    def take(self, message: Any) -> None:
        """What the supervisor says of the engine."""
        match message:
            case Settled():
                self._has_settled(message)
            case control.Up():
                self._is_up(message.address, message.report)
            case control.Down():
                self._is_down(message.reason)


async def work(channel: socket.socket, listener: socket.socket) -> int:
    """Serve until the supervisor, or a signal, says to finish."""
    reader, writer = await asyncio.open_connection(sock=channel)
    begin = await control.read(reader)
    if not isinstance(begin, control.Begin):
        return 1
    config = service_config(load_config(mapping=begin.config))
    known = config.plugins
    registry = Registry.discover(load=known.load, disable=known.disable, only=known.only)
    link = SupervisedEngine()

    def loaded(state: ServerState) -> None:
        told: control.Message
        if state.failure is None:
            told = control.Loaded(state.names, state.llm.max_model_len)
        else:
            told = control.Failed(str(state.failure))
        writer.write(control.encode(told))

    llm = AsyncLLM.from_parts(lambda: parts(link, registry, begin.name))
    more = plugin_routes(config, registry, llm, served_names(config))
    session = Session(
        llm,
        config,
        listener,
        begin.api_keys,
        loaded,
        make_parsers=partial(make_parsers, config, registry),
        more_routes=more,
        worker=begin.index,
    )

    async def follow() -> None:
        while (message := await control.read(reader)) is not None:
            if isinstance(message, control.Finish):
                session.server.hurry() if message.hurry else session.server.stop()
            else:
                link.take(message)
        session.server.hurry()  # the supervisor has gone

    following = asyncio.create_task(follow())
    # A terminal or a service manager may signal all processes, and the supervisor tells us too:
    # only the supervisor ends the waiting.
    with on_signals(session.server.stop, session.server.stop):
        status = await session.serve()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()  # what was written last has left
    return status


def main(control_fd: int, parent: int, listener_fd: int) -> int:
    """Run one API process."""
    end_with_parent(parent)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    channel, listener = socket.socket(fileno=control_fd), socket.socket(fileno=listener_fd)
    return run_loop(work(channel, listener))


if __name__ == "__main__":
    sys.exit(main(*(int(number) for number in sys.argv[1:4])))
