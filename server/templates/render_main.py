"""`python -m octavo.server.templates.render_main FD PARENT MEMORY`: renders chats in turn.

A template is a program. It runs in this process, which has its memory bounded and can be killed,
so that one that does not end, or fills the memory, harms nobody else. Requests and answers are
msgpack.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import sys
from typing import Any

import msgspec

from octavo.core.errors import RequestError
from octavo.kernels.child_process import (
    end_with_parent,
    frame,
    ignore_signals,
    limit_memory,
    receive_frame,
)


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


def main(fd: int, parent: int, memory: int) -> int:
    """Until the other end closes the connection."""
    ignore_signals()
    end_with_parent(parent)
    with socket.socket(fileno=fd) as connection, contextlib.suppress(EOFError, BrokenPipeError):
        setting = msgspec.msgpack.decode(receive_frame(connection), type=Setting)
        module, _, name = setting.factory.partition(":")
        chats = getattr(importlib.import_module(module), name)(**setting.arguments)
        limit_memory(memory)
        _send(connection, Ready())
        while True:
            answer = _render(chats, receive_frame(connection), setting.longest)
            _send(connection, answer)
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


def _send(connection: socket.socket, message: msgspec.Struct) -> None:
    connection.sendall(frame(msgspec.msgpack.encode(message)))


if __name__ == "__main__":
    sys.exit(main(*(int(number) for number in sys.argv[1:4])))
