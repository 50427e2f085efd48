"""Several API processes on one port: the process that starts and watches them and the engine.

It answers no request itself and holds none, so that what ends with an API process is that one's
requests only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping

from octavo.core.errors import OctavoError
from octavo.engine.process.process import EngineProcess, plain
from octavo.engine.process.wire import Settled
from octavo.frontend.process_client import client_name
from octavo.kernels import child_process
from octavo.plugins.observers.prometheus.board import Board
from octavo.server.app.http_server import LAST_WORDS_S
from octavo.server.config import ServiceConfig
from octavo.server.process import control

logger = logging.getLogger("octavo.server")

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
HEALTHY_S = 60.0
"""A worker that ran this long is started again at once."""

STOP_S = LAST_WORDS_S + 10.0
"""Seconds beyond the drain after which a worker that is told to finish is killed."""


class Supervisor:
    """Runs the engine and `server.api_workers` API processes. Made in the loop.

    on_ready: called once, with what a worker says, when all of them answer requests. board: where
    they count.
    """

    def __init__(
        self,
        config: ServiceConfig,
        sock: socket.socket,
        api_keys: Mapping[str, str],
        engine: EngineProcess,
        on_ready: Callable[[control.Loaded], None],
        *,
        board: Board,
    ) -> None:
        self._config, self._sock, self._keys = config, sock, dict(api_keys)
        self.engine, self._on_ready = engine, on_ready
        self._board = board
        self._workers: list[_Worker | None] = [None] * config.server.api_workers
        self._loaded: set[int] = set()
        self._announced = self._stopping = False
        self._settled: Settled | None = None
        self._state: control.Up | control.Down | None = None
        self._stop = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._failure: Exception | None = None
        self._backoff = [FIRST_BACKOFF_S] * config.server.api_workers

    async def serve(self) -> None:
        """Until `stop`. Raises why the engine did not start."""
        self.engine.on_up, self.engine.on_down = self._engine_up, self._engine_down
        self.engine.launch()
        for index in range(len(self._workers)):
            self._spawn(index)
        starting = asyncio.create_task(self._follow_start())
        try:
            await self._stop.wait()
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._end()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let running requests finish, then end."""
        self._stopping = True
        self._stop.set()
        self._tell(control.Finish())

    def hurry(self) -> None:
        """End without waiting for requests."""
        self.stop()
        self._tell(control.Finish(hurry=True))

    # ---- the engine ------------------------------------------------------------------------------

    async def _follow_start(self) -> None:
        try:
            self._settled = await self.engine.settled()
            self._tell(self._settled)
            await self.engine.up()
        except Exception as error:
            self._failure = error
            self.hurry()

    def _engine_up(self) -> None:
        assert self.engine.address is not None, "an engine that runs has an address"
        self._state = control.Up(self.engine.address, self.engine.report)
        self._tell(self._state)

    def _engine_down(self, reason: str) -> None:
        self._state = control.Down(reason)
        self._tell(self._state)

    def _tell(self, message: control.Message) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.tell(message)

    # ---- the workers -----------------------------------------------------------------------------

    def _spawn(self, index: int) -> None:
        if self._stopping:
            return
        worker = _Worker(index, self._sock, self._board.fd, self._ended)
        self._workers[index] = worker
        worker.follow(self._take)
        worker.tell(control.Begin(plain(self._config), self._keys, worker.name, index))
        if self._settled is not None:
            worker.tell(self._settled)
        if self._state is not None:
            worker.tell(self._state)

    def _take(self, index: int, message: object) -> None:
        if isinstance(message, control.Loaded):
            self._loaded.add(index)
            if len(self._loaded) == len(self._workers) and not self._announced:
                self._announced = True
                self._on_ready(message)
        elif isinstance(message, control.Failed) and not self._announced and not self._stopping:
            self._failure = OctavoError(message.message)
            self.hurry()

    def _ended(self, worker: _Worker) -> None:
        self._workers[worker.index] = None
        self._board.api(worker.index)  # what it had under way has ended
        worker.close()
        self.engine.gone(worker.name)
        if self._stopping:
            if not any(self._workers):
                self._all_ended.set()
            return
        logger.error("API process %d ended (%s)", worker.process.pid, worker.how())
        loop = asyncio.get_running_loop()
        delay = self._backoff[worker.index]
        if loop.time() - worker.started > HEALTHY_S:
            delay = FIRST_BACKOFF_S
        self._backoff[worker.index] = min(2 * delay, LONGEST_BACKOFF_S)
        loop.call_later(delay, self._spawn, worker.index)

    async def _end(self) -> None:
        """Wait for the workers, then stop the engine."""
        self._stopping = True
        if any(self._workers):
            patience = self._config.server.shutdown_timeout_s + STOP_S
            try:
                await asyncio.wait_for(self._all_ended.wait(), patience)
            except TimeoutError:
                for worker in filter(None, self._workers):
                    worker.process.kill()
                await self._all_ended.wait()
        await asyncio.to_thread(self.engine.close)


class _Worker:
    """One API process. on_end: called in the loop when it has ended."""

    def __init__(
        self,
        index: int,
        listener: socket.socket,
        shared: int | None,
        on_end: Callable[[_Worker], None],
    ) -> None:
        self.index, self.name = index, client_name()
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self.started = self._loop.time()
        passed = [listener.fileno()] if shared is None else [listener.fileno(), shared]
        self.process, self._mine = child_process.spawn_connected(
            "octavo.server.process.api_worker", listener.fileno(), pass_fds=passed, secrets=True
        )
        self._writer: asyncio.StreamWriter | None = None
        self._early: list[bytes] = []
        self._reading: asyncio.Task[None] | None = None
        threading.Thread(target=self._wait, name="worker-exit", daemon=True).start()

    def follow(self, on_message: Callable[[int, object], None]) -> None:
        """Hand over what the worker says, from now on."""

        async def read() -> None:
            reader, self._writer = await asyncio.open_connection(sock=self._mine)
            self._writer.write(b"".join(self._early))
            while (message := await control.read(reader)) is not None:
                on_message(self.index, message)

        self._reading = asyncio.create_task(read())

    def tell(self, message: control.Message) -> None:
        """Send a message, or keep it until the connection stands."""
        data = control.encode(message)
        if self._writer is None:
            self._early.append(data)
        else:
            self._writer.write(data)

    def how(self) -> str:
        """The way it ended."""
        return child_process.describe_exit(self.process.returncode)

    def close(self) -> None:
        """Close the connection."""
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._mine.close()

    def _wait(self) -> None:
        self.process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_end, self)
