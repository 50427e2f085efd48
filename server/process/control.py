"""What the supervisor and its API workers tell each other, over a pair of connected sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from octavo.engine.process.wire import Settled
from octavo.engine.report import StartupReport
from octavo.kernels.child_process import frame, read_frame


class Begin(msgspec.Struct, tag=True):
    """To a worker, first of all. name: of this worker toward the engine. index: its number."""

    config: dict[str, Any]
    api_keys: dict[str, str]
    name: bytes
    index: int


class Up(msgspec.Struct, tag=True):
    """The engine takes requests at `address`."""

    address: str
    report: StartupReport | None


class Down(msgspec.Struct, tag=True):
    """The engine has stopped."""

    reason: str


class Finish(msgspec.Struct, tag=True):
    """Stop serving; hurry: wait for no request."""

    hurry: bool = False


class Loaded(msgspec.Struct, tag=True):
    """From a worker: it answers requests. max_model_len: tokens of context."""

    names: list[str]
    max_model_len: int


class Failed(msgspec.Struct, tag=True):
    """From a worker: it cannot serve (the tokenizer cannot be loaded, for one)."""

    message: str


Message = Begin | Settled | Up | Down | Finish | Loaded | Failed

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """A message with its length before it."""
    return frame(_encoder.encode(message))


async def read(reader: asyncio.StreamReader) -> Any:
    """The next message, None when the other side has gone."""
    try:
        return _decoder.decode(await read_frame(reader))
    except EOFError:
        return None
