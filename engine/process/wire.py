"""What front ends and the engine process say to each other: msgspec structs, encoded as msgpack.

A front end (an API process) has a ZeroMQ DEALER socket, the engine a ROUTER. The process that
started the engine has one more DEALER socket, under the name `OWNER`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.messages import EngineOutputs, EngineRequest
from octavo.engine.report import StartupReport
from octavo.kernels.codec import Codec

OWNER = b"owner"


# ---- to the engine ------------------------------------------------------------------------------


class Start(msgspec.Struct, tag=True):
    """From the owner, first of all. config: as YAML would give it. origin: where its values were
    written, as (path, file, line)."""

    config: dict[str, Any]
    origin: list[tuple[list[str | int], str, int | None]] = []


class Hello(msgspec.Struct, tag=True):
    """From a front end, first of all."""


class Submit(msgspec.Struct, tag=True):
    """Sequences to add. Handles need to be unique within the front end only."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    """Sequences to end. reason: as in `EngineClient.abort`."""

    handles: list[int]
    reason: str = "abort"


class Call(msgspec.Struct, tag=True):
    """Call a method of the engine with plain data; answered by an `Answer` with the same id."""

    id: int
    name: str
    args: list[Any] = []


class Ping(msgspec.Struct, tag=True):
    """From the owner; answered between two steps, so that an engine which hangs is found out."""

    id: int


class Gone(msgspec.Struct, tag=True):
    """From the owner: a front end has ended, and its sequences with it."""

    client: bytes


class Stop(msgspec.Struct, tag=True):
    """From the owner: end now."""


ToEngine = Start | Hello | Submit | Abort | Call | Ping | Gone | Stop


# ---- from the engine ----------------------------------------------------------------------------


class Progress(msgspec.Struct, tag=True):
    """A line for people, while the engine starts."""

    text: str


class Settled(msgspec.Struct, tag=True):
    """What the configuration turned out to mean, before the model is loaded: all that the text side
    needs. config: with nothing left to decide."""

    config: dict[str, Any]
    device: str
    model_config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_dir: str | None
    chat_template: str | None


class Ready(msgspec.Struct, tag=True):
    """The engine can take requests."""

    report: StartupReport | None = None


class Died(msgspec.Struct, tag=True):
    """The engine ends by itself: it could not start, or a step raised. kind: class of the error."""

    kind: str
    message: str


class Answer(msgspec.Struct, tag=True):
    """Of a `Call`; error: what was raised, value is meaningless then."""

    id: int
    value: Any = None
    error: str | None = None


class Pong(msgspec.Struct, tag=True):
    """Of a `Ping`."""

    id: int


FromEngine = Progress | Settled | Ready | Died | EngineOutputs | Answer | Pong


def to_engine() -> Codec[Any]:
    """Codec of `ToEngine`."""
    return Codec(ToEngine)  # type: ignore[arg-type]


def from_engine() -> Codec[Any]:
    """Codec of `FromEngine`."""
    return Codec(FromEngine)  # type: ignore[arg-type]
