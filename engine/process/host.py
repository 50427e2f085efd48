"""Inside the engine process: build the engine, then inbox, step, inbox, step, in one thread."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from octavo.core.errors import OctavoError, RequestError
from octavo.core.messages import EngineOutputs, only_finished, refused
from octavo.engine.process import wire
from octavo.engine.process.folder import address, remove_folder
from octavo.engine.process.split import adopt, globally, split
from octavo.kernels.child_process import watch_parent

if TYPE_CHECKING:
    from octavo.engine.core import EngineCore

logger = logging.getLogger(__name__)

START_S = 30
"""Seconds that the owner has for its first message."""

LINGER_MS = 2000
"""Milliseconds that last messages get to leave."""

_OWN = frozenset({"add", "abort", "step", "close", "has_work"})


def main(folder: Path, parent: int) -> int:
    """Run the engine process. Returns its exit status: 0 when told to stop, 1 otherwise."""
    os.dup2(2, 1)  # stdout is the front end's; a worker that prints is heard on stderr
    watch_parent(parent, lambda: remove_folder(folder))
    # The owner says when to stop, so that what runs can finish: a signal that a terminal or a
    # service manager sends to all processes must not end the engine before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        socket.setsockopt(option, 0)
    try:
        socket.bind(address(folder))
        return Host(socket).run()
    finally:
        socket.close()
        context.term()
        remove_folder(folder)


class Host:
    """Serves one engine on a ROUTER socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._incoming, self._outgoing = wire.to_engine(), wire.from_engine()
        self._clients: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._live: dict[int, set[int]] = {}  # handles that run, by client
        self._stopping = False

    def run(self) -> int:
        """Until told to stop. Returns the exit status."""
        start = self._first()
        if start is None:
            return 1
        try:
            engine = self._build(start)
        except Exception as error:
            if not isinstance(error, OctavoError):
                logger.exception("the engine did not start")
            self._tell(wire.OWNER, _died(error))
            return 1
        try:
            self._tell(wire.OWNER, wire.Ready(engine.report))
            self._serve(engine)
            return 0
        except Exception as error:
            logger.exception("the engine stopped")
            self._tell(wire.OWNER, _died(error))
            return 1
        finally:
            with contextlib.suppress(Exception):
                engine.close()

    def _first(self) -> wire.Start | None:
        if not self._socket.poll(START_S * 1000):
            return None
        _, data = self._socket.recv_multipart()
        message = self._incoming.decode(data)
        return message if isinstance(message, wire.Start) else None

    def _build(self, start: wire.Start) -> EngineCore:
        from octavo.core.config import load_config
        from octavo.core.registry import Registry
        from octavo.engine.builder import build_engine
        from octavo.engine.config import EngineConfig
        from octavo.engine.resolve import resolve

        config = load_config(EngineConfig, mapping=start.config)
        config.origin.replace(start.origin)
        known = config.plugins
        registry = Registry.discover(load=known.load, disable=known.disable, only=known.only)
        resolved = resolve(config, registry)
        self._tell(
            wire.OWNER,
            wire.Settled(
                config=resolved.config.model_dump(mode="json"),
                device=resolved.platform.device,
                model_config=resolved.model_config,
                generation_config=resolved.generation_config,
                tokenizer_dir=_text(resolved.tokenizer_dir),
                chat_template=resolved.chat_template,
            ),
        )
        return build_engine(resolved, registry, self._progress)

    def _progress(self, text: str) -> None:
        self._tell(wire.OWNER, wire.Progress(text))

    # ---- the loop --------------------------------------------------------------------------------

    def _serve(self, engine: EngineCore) -> None:
        """Messages are taken between steps; without work the process sleeps until one comes."""
        while True:
            if not engine.has_work():
                self._take(engine, self._socket.recv_multipart())
            for message in iter(self._pending, None):
                self._take(engine, message)
            if self._stopping:
                return
            if engine.has_work():
                self._publish(engine.step())

    def _pending(self) -> list[bytes] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def _take(self, engine: EngineCore, frames: list[bytes]) -> None:
        name, data = frames
        message = self._incoming.decode(data)
        match message:
            case wire.Submit():
                self._add(engine, name, message)
            case wire.Abort():
                number = self._clients.get(name)
                if number is not None:
                    handles = [globally(handle, number) for handle in message.handles]
                    engine.abort(handles, message.reason)
            case wire.Call():
                self._tell(name, _answer(engine, message))
            case wire.Ping():
                self._tell(name, wire.Pong(message.id))
            case wire.Hello():
                self._welcome(name)
            case wire.Gone():
                self._forget(engine, message.client)
            case wire.Stop():
                self._stopping = True

    def _welcome(self, name: bytes) -> None:
        if name not in self._clients:
            number = max(self._names, default=0) + 1
            self._clients[name], self._names[number] = number, name
            self._live[number] = set()

    def _forget(self, engine: EngineCore, name: bytes) -> None:
        number = self._clients.pop(name, None)
        if number is not None:
            engine.abort(sorted(self._live.pop(number)))
            # The number stays taken, so that no later front end is taken for this one.
            self._names[number] = b""

    def _add(self, engine: EngineCore, name: bytes, message: wire.Submit) -> None:
        number = self._clients.get(name)
        if number is None:  # it has ended meanwhile
            return
        ended = []
        for request in message.requests:
            local = request.handle
            adopt(request, number)
            try:
                engine.add(request)
                self._live[number].add(request.handle)
            except RequestError as error:
                ended.append(refused(local, error))
        if ended:
            self._tell(name, only_finished(ended))

    def _publish(self, outputs: EngineOutputs | None) -> None:
        """Send every front end its part of a step, as one message."""
        if outputs is None:
            return
        for number, part in split(outputs).items():
            live = self._live.get(number)
            if live is None:
                continue
            live.difference_update(globally(finish.handle, number) for finish in part.finished)
            self._tell(self._names[number], part)

    def _tell(self, name: bytes, message: Any) -> None:
        # To a front end that has gone, ZeroMQ drops it.
        self._socket.send_multipart([name, self._outgoing.encode(message)])


def _answer(engine: EngineCore, call: wire.Call) -> wire.Answer:
    """A failed question is the asker's alone."""
    try:
        if call.name.startswith("_") or call.name in _OWN:
            raise OctavoError(f"'{call.name}' cannot be called from another process")
        method: Callable[..., Any] = getattr(engine, call.name)
        answer = wire.Answer(call.id, method(*call.args))
        wire.from_engine().encode(answer)
    except Exception as error:
        text = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
        return wire.Answer(call.id, None, text)
    return answer


def _died(error: Exception) -> wire.Died:
    return wire.Died(type(error).__name__, str(error))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
