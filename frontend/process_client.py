"""`ProcessClient`: an engine in another process, behind the same interface as one in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from octavo.core.errors import EngineDeadError, OctavoError, RequestError
from octavo.core.messages import EngineOutputs, EngineRequest
from octavo.engine.process import wire
from octavo.engine.process.channel import Channel
from octavo.engine.process.link import EngineLink
from octavo.frontend.client import AsyncEngineClient

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.frontend.text.inputs import InputProcessor


class ProcessClient(AsyncEngineClient):
    """One front end of the engine that `link` follows. All methods but `close` belong to the loop
    in which it is started. When the engine ends, what runs fails; when it is started again, new
    requests go to the new one."""

    def __init__(self, link: EngineLink, name: bytes | None = None) -> None:
        self._link = link
        self._name = name or client_name()
        self._channel: Channel | None = None
        self._calls: dict[int, Future[Any]] = {}
        self._ids = itertools.count()
        self._on_outputs: Callable[[EngineOutputs], None] | None = None
        self._on_death: Callable[[str], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(
        self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        self._link.on_up, self._link.on_down = self._up, self._down
        await self._link.up()
        if self._channel is None and self._link.address is not None:
            self._up()
        elif self._link.down_reason is not None:  # it came up, and went, before anybody listened
            self.dead_reason = self._link.down_reason

    def add(self, requests: Sequence[EngineRequest]) -> None:
        channel = self._connected()
        try:
            channel.send(wire.Submit(list(requests)))
        except (TypeError, OverflowError) as error:
            raise RequestError(f"the request cannot be sent to the engine: {error}") from None

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        if handles and self.is_alive and self._channel is not None:
            self._channel.send(wire.Abort(list(handles), reason))

    def call(self, name: str, *args: Any) -> Future[Any]:
        channel = self._connected()
        number = next(self._ids)
        channel.send(wire.Call(number, name, list(args)))
        future: Future[Any] = Future()
        self._calls[number] = future
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        return future

    def close(self) -> None:
        self.dead_reason = "the engine was closed"
        self._link.close()
        if self._channel is not None and self._loop is not None:
            if self._loop.is_closed():
                self._channel.close()
            else:
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._disconnect)

    def _connected(self) -> Channel:
        self.check_alive()
        assert self._channel is not None, "start comes first"
        return self._channel

    # ---- in the loop -----------------------------------------------------------------------------

    def _up(self) -> None:
        assert self._link.address is not None, "an engine that runs has an address"
        if self._channel is not None:
            self._channel.close()
        self._channel = Channel(self._link.address, self._name, self._take)
        self._channel.send(wire.Hello())
        self.report = self._link.report
        self.dead_reason = None

    def _down(self, reason: str) -> None:
        if self.dead_reason == "the engine was closed":
            return
        first, self.dead_reason = self.dead_reason is None, reason
        self._disconnect()
        if first and self._on_death is not None:
            self._on_death(reason)

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        for future in list(self._calls.values()):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineDeadError(self.dead_reason or "the engine was closed"))

    def _take(self, message: Any) -> None:
        match message:
            case EngineOutputs():
                assert self._on_outputs is not None, "outputs before start"
                self._on_outputs(message)
            case wire.Answer():
                future = self._calls.get(message.id)
                if future is None:
                    return
                with contextlib.suppress(InvalidStateError):
                    if message.error is None:
                        future.set_result(message.value)
                    else:
                        future.set_exception(OctavoError(message.error))


def client_name() -> bytes:
    """A name that no other front end has."""
    return f"client-{os.getpid()}-{secrets.token_hex(4)}".encode()


async def parts(
    link: EngineLink, registry: Registry, name: bytes | None = None
) -> tuple[ProcessClient, InputProcessor]:
    """Client and text side for `AsyncLLM.from_parts`: the tokenizer is loaded beside the model."""
    try:
        link.launch()
        settled = await link.settled()
        inputs = await asyncio.to_thread(text_side, settled, registry)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(link.close))
        raise
    return ProcessClient(link, name), inputs


def text_side(settled: wire.Settled, registry: Registry) -> InputProcessor:
    """The input processor for what the engine process has resolved."""
    from pathlib import Path

    from octavo.core.config import config_model
    from octavo.core.contracts import Platform, ProbeContext
    from octavo.engine.config import EngineConfig
    from octavo.engine.resolve import Resolved
    from octavo.engine.tokenizer import make_tokenizer
    from octavo.frontend import assembly

    config = config_model(EngineConfig).model_validate(settled.config)
    folder = None if settled.tokenizer_dir is None else Path(settled.tokenizer_dir)
    platform = Platform(settled.device)
    facts = {"source": config.model.source, "tokenizer_dir": folder}
    known = {key: value for key, value in facts.items() if value is not None}
    chosen = config.model.tokenizer_backend
    context = ProbeContext(platform, known)
    selections = {}
    if chosen.name != "auto":
        selections["tokenizer"] = registry.select("tokenizer", chosen, context)
    resolved = Resolved(
        config,
        platform,
        selections=selections,
        model_config=settled.model_config,
        generation_config=settled.generation_config,
        tokenizer_dir=folder,
        chat_template=settled.chat_template,
    )
    return assembly.make_inputs(resolved, make_tokenizer(resolved, registry))
