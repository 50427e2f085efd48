"""`python -m octavo.server.templates.render_main PARENT MEMORY`: renders chats in turn.

A template is a program. It runs in this process, which has its memory bounded and can be killed,
so that one that does not end, or fills the memory, harms nobody else. Requests come from the
standard input and answers go to the standard output, as msgpack with the length before it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.core.errors import RequestError
from octavo.kernels.child_process import end_with_parent

LENGTH = struct.Struct("<I")


class Setting(msgspec.Struct):
    """First of all. factory, arguments: of `ChatSource`. longest: characters of a prompt."""

    factory: str
    arguments: dict[str, Any]
    longest: int


class Ready(msgspec.Struct):
    """The answer to it."""


class Rendering(msgspec.Struct):
    """A chat, as `Tokenizer.chat` gets it."""

    messages: list[dict[str, Any]]
    keywords: dict[str, Any]


class Rendered(msgspec.Struct):
    """text, or what was wrong. spoilt: this process ends now, for it may lack memory."""

    text: str = ""
    error: str | None = None
    param: str | None = None
    spoilt: bool = False


def frame(message: msgspec.Struct) -> bytes:
    """A message with its length before it."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def main(parent: int, memory: int) -> int:
    """Until the other end closes the pipe."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # What a template or a library prints must not reach the pipe.
    sys.stdout = sys.stderr
    with contextlib.suppress(EOFError, BrokenPipeError):
        setting = msgspec.msgpack.decode(_read(source), type=Setting)
        module, _, name = setting.factory.partition(":")
        chats = getattr(importlib.import_module(module), name)(**setting.arguments)
        _bound_memory(memory)
        _write(sink, Ready())
        while True:
            answer = _render(chats, _read(source), setting.longest)
            _write(sink, answer)
            if answer.spoilt:
                return 0
    return 0


def _render(chats: Any, data: bytes, longest: int) -> Rendered:
    try:
        request = msgspec.msgpack.decode(data, type=Rendering)
        text = chats.render(request.messages, **request.keywords)
        if len(text) > longest:
            return Rendered(
                error=f"chat template: the prompt has {len(text)} characters, at most {longest} "
                "are taken",
                param="messages",
            )
        text.encode()
        return Rendered(text)
    except MemoryError:
        return Rendered(error="chat template: it takes too much memory", spoilt=True)
    except RequestError as error:
        spoilt = isinstance(error.__cause__, MemoryError)
        what = "chat template: it takes too much memory" if spoilt else error.message
        return Rendered(error=what, param=error.param, spoilt=spoilt)
    except UnicodeEncodeError:
        return Rendered(error="chat template: the prompt is not valid Unicode", param="messages")


def _bound_memory(memory: int) -> None:
    """Beyond what is in use already (Linux; elsewhere the time bounds it)."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(source: BinaryIO) -> bytes:
    (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
    return _exactly(source, length)


def _exactly(source: BinaryIO, count: int) -> bytes:
    data = source.read(count)
    if len(data) < count:
        raise EOFError
    return data


def _write(sink: BinaryIO, message: msgspec.Struct) -> None:
    sink.write(frame(message))
    sink.flush()


if __name__ == "__main__":
    sys.exit(main(*(int(number) for number in sys.argv[1:3])))
