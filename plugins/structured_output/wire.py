"""What the engine and the process that compiles grammars say to each other: msgspec structs,
encoded as msgpack, one a message of a connection (`send_bytes`, `recv_bytes`: no pickle)."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.structured_outputs import StructuredOutputsParams


class Start(msgspec.Struct, tag=True):
    """First of all. load, disable, only: plugins, as in the configuration. name, options: of the
    grammar engine. tokens, end_token_ids: the vocabulary. timeout_s, memory_bytes,
    processes, max_bytes: limits, from the section `structured_outputs`."""

    load: list[str]
    disable: list[str]
    only: list[str] | None
    name: str
    options: dict[str, Any]
    tokens: list[bytes]
    end_token_ids: list[int]
    timeout_s: float
    memory_bytes: int
    processes: int
    max_bytes: int


class Job(msgspec.Struct, tag=True):
    """A grammar to compile."""

    id: int
    spec: StructuredOutputsParams


class Drop(msgspec.Struct, tag=True):
    """Nobody waits for this job any more: leave it, if it has not begun."""

    id: int


class Compiled(msgspec.Struct, tag=True):
    """The answer to a job."""

    id: int
    data: bytes


class Refused(msgspec.Struct, tag=True):
    """The other answer to a job. fault: whether it is the grammar engine's, not the grammar's."""

    id: int
    message: str
    fault: bool = False


class Dropped(msgspec.Struct, tag=True):
    """The job was left."""

    id: int


class Broken(msgspec.Struct, tag=True):
    """The engine cannot be made: nothing will be compiled."""

    message: str


ToCompiler = Start | Job | Drop
FromCompiler = Compiled | Refused | Dropped | Broken

encode = msgspec.msgpack.Encoder().encode
to_compiler: msgspec.msgpack.Decoder[Start | Job | Drop] = msgspec.msgpack.Decoder(ToCompiler)
from_compiler: msgspec.msgpack.Decoder[Compiled | Refused | Dropped | Broken] = (
    msgspec.msgpack.Decoder(FromCompiler)
)
