"""`ChatRenderer`: chat templates rendered in processes that can be killed."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo.core.contracts.tokenizer import ChatSource
from octavo.core.errors import OctavoError, RequestError
from octavo.kernels import child_process
from octavo.server.templates.render_main import Ready, Rendered, Rendering, Setting

_MAIN = "octavo.server.templates.render_main"
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}

encode = msgspec.msgpack.encode

START_S = 60.0
"""Seconds that a process gets to start."""


class ChatRenderer:
    """Renders by `source`, at most `processes` chats at once, each in at most `timeout_s` seconds
    and `memory` bytes. All methods belong to one asyncio loop. Processes are started when they are
    needed, and stay."""

    def __init__(
        self,
        source: ChatSource,
        *,
        timeout_s: float,
        memory: int,
        longest: int,
        processes: int = 4,
    ) -> None:
        self._setting = Setting(source.factory, source.arguments, longest)
        self._timeout_s, self._memory = timeout_s, memory
        self._places = asyncio.Semaphore(processes)
        self._at_work: set[asyncio.Task[Rendered | None]] = set()
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._closed = False

    async def prepare(self) -> None:
        """Start a process now, so that the first chat need not wait."""
        async with self._places:
            self._idle.append(await self._process())

    async def render(self, messages: Sequence[Mapping[str, Any]], **keywords: Any) -> str:
        """As `Tokenizer.chat`. Raises `RequestError`, also for a template that takes too long or
        too much memory. When it is cancelled, what was begun is finished: a new process would take
        longer than almost any chat."""
        try:
            request = encode(Rendering([dict(message) for message in messages], keywords))
        except (TypeError, OverflowError, ValueError, RecursionError) as error:
            raise RequestError(f"messages cannot be rendered: {error}", param="messages") from None
        blamed = "messages" if keywords.get("template") is None else "chat_template"
        await self._places.acquire()
        task = asyncio.create_task(self._render(request, blamed))
        self._at_work.add(task)
        task.add_done_callback(self._done)
        answer = await asyncio.shield(task)
        if answer is None:
            raise RequestError("chat template: what renders it has died", param=blamed)
        if answer.error is not None:
            raise RequestError(answer.error, param=answer.param or blamed)
        return answer.text

    def _done(self, task: asyncio.Task[Rendered | None]) -> None:
        self._at_work.discard(task)
        self._places.release()
        if not task.cancelled():
            task.exception()  # nobody may wait for it any more

    async def _render(self, request: bytes, blamed: str) -> Rendered | None:
        answer = await self._answer(request, blamed)
        return await self._answer(request, blamed) if answer is None else answer

    async def _answer(self, request: bytes, blamed: str) -> Rendered | None:
        """None when the process has died, which may have been before this request."""
        process = await self._process()
        kept = False
        try:
            answer: Rendered = await asyncio.wait_for(
                process.ask(request, Rendered), self._timeout_s
            )
            kept = not answer.spoilt and not self._closed
            return answer
        except TimeoutError:
            raise RequestError(
                f"chat template: it takes longer than {self._timeout_s:g} s "
                "(server.chat_template_timeout_s)",
                param=blamed,
            ) from None
        except EOFError:
            return None
        finally:
            if kept:
                self._idle.append(process)
            else:
                await self._end(process)

    async def close(self) -> None:
        """End all processes."""
        self._closed = True
        self._idle.clear()
        for process in list(self._all):
            await self._end(process)
        await asyncio.gather(*self._at_work, return_exceptions=True)

    async def _process(self) -> _Process:
        if self._closed:
            raise OctavoError("the server is stopping")
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await self._end(process)
        process = await _Process.start(self._memory)
        self._all.add(process)
        try:
            await asyncio.wait_for(process.ask(encode(self._setting), Ready), START_S)
        except (TimeoutError, EOFError):
            await self._end(process)
            raise OctavoError("the process that renders chat templates does not start") from None
        except BaseException:
            await self._end(process)
            raise
        return process

    async def _end(self, process: _Process) -> None:
        self._all.discard(process)
        await asyncio.shield(process.kill())


class _Process:
    """One process of `render_main`."""

    def __init__(
        self,
        inner: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._inner, self._reader, self._writer = inner, reader, writer

    @classmethod
    async def start(cls, memory: int) -> _Process:
        # What a template or a library prints is not an answer: it goes to standard error.
        # In this thread: the kernel takes the end of the thread that forks for the parent's.
        inner, connection = child_process.spawn_connected(
            _MAIN, memory, environment=_ENVIRONMENT, output=2
        )
        try:
            return cls(inner, *await asyncio.open_connection(sock=connection))
        except BaseException:
            child_process.kill_process(inner)
            raise

    @property
    def alive(self) -> bool:
        return self._inner.poll() is None

    async def ask(self, request: bytes, answer: type[Any]) -> Any:
        """Raises `EOFError` when the process ends instead of answering."""
        try:
            self._writer.write(child_process.frame(request))
            await self._writer.drain()
        except ConnectionError:
            raise EOFError from None
        return msgspec.msgpack.decode(await child_process.read_frame(self._reader), type=answer)

    async def kill(self) -> None:
        """And wait for its end."""
        child_process.kill_process(self._inner)
        self._writer.close()
        await asyncio.to_thread(self._inner.wait)
