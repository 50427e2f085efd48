"""What is measured in a process of its own, and both ends of its connection.

Messages are msgpack. A request is a mapping; its answers are `{"progress": value}`, any number of
them, then `{"result": value}` or `{"error": text, "spoiled": whether the process should not be used
again}`. Between requests the process sleeps in a read. It ends when its parent closes the
connection, or ends.
"""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from octavo.core.errors import OctavoError
from octavo.kernels import child_process

decode = msgspec.msgpack.decode


def encode(message: Any) -> bytes:
    """As msgpack; NumPy's scalars as numbers."""
    return msgspec.msgpack.encode(message, enc_hook=lambda value: value.item())


class ChildError(Exception):
    """The child answered with an error. spoiled: whether it should not be used again."""

    def __init__(self, message: str, spoiled: bool = False) -> None:
        super().__init__(message)
        self.spoiled = spoiled


class Child:
    """Runs `python -m module`, which calls `serve`. output: where what it prints goes, a file or a
    descriptor; None: where this process's goes."""

    def __init__(self, module: str, output: Any = None) -> None:
        self.process, self._socket = child_process.spawn_connected(module, output=output)

    def ask(
        self,
        request: Mapping[str, Any],
        on_progress: Callable[[Any], object] = lambda value: None,
        until: float | None = None,
    ) -> Any:
        """The result of a request. Raises `ChildError`, `EOFError` when the process ends instead
        of answering, and `TimeoutError` when it has
        not answered `until` then (of `time.monotonic`)."""
        try:
            self._socket.sendall(child_process.frame(encode(request)))
        except OSError:
            raise EOFError from None
        while True:
            answer = decode(child_process.receive_frame(self._socket, until))
            if "progress" in answer:
                on_progress(answer["progress"])
            elif "error" in answer:
                raise ChildError(answer["error"], answer["spoiled"])
            else:
                return answer["result"]

    def how_it_ended(self, patience_s: float = 5.0) -> str:
        """`SIGABRT`, `status 1`, or that it has not ended within `patience_s` seconds."""
        with suppress(subprocess.TimeoutExpired):
            return child_process.describe_exit(self.process.wait(patience_s))
        return "without its process"

    def close(self, patience_s: float = 0.0) -> None:
        """End the process and its children. It gets `patience_s` seconds to end by itself."""
        self._socket.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(patience_s)
        child_process.kill_process(self.process)
        self.process.wait()


Progress = Callable[[Any], None]


def serve(
    fd: int, parent: int, answer: Callable[[dict[str, Any], Progress], Any], *, spoiled: Any = None
) -> None:
    """In the child: answer requests until the parent closes the connection, or ends.

    answer: gets a request and what sends progress; its result is the answer's. spoiled: of an
    exception, whether the process should not be used after it; default: never.
    """
    child_process.watch_parent(parent, lambda: None)
    with socket.socket(fileno=fd) as connection:

        def send(message: dict[str, Any]) -> None:
            connection.sendall(child_process.frame(encode(message)))

        def progress(value: Any) -> None:
            send({"progress": value})

        with suppress(EOFError, BrokenPipeError):
            while True:
                request = decode(child_process.receive_frame(connection))
                try:
                    result = {"result": answer(request, progress)}
                except BrokenPipeError:
                    raise
                except Exception as error:
                    name = "" if isinstance(error, OctavoError) else f"{type(error).__name__}: "
                    result = {
                        "error": f"{name}{error}",
                        "spoiled": spoiled is not None and spoiled(error),
                    }
                send(result)
