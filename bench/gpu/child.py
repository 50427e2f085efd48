"""The process that does the parts, and the parent's end of it.

The parent asks in JSON lines over a socket: `{"do": kind, "given": ..., "device": ...}`. Answers
are `{"path": [...], "value": ...}` for each figure, then `{"done": true}`, or `{"error": text,
"spoiled": whether the process is not to be used again}`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from octavo.bench.gpu.budget import Outcome, PartError
from octavo.bench.gpu.parts import Part
from octavo.core.errors import OctavoError
from octavo.engine.process.parent import watch

OnFigure = Callable[[Outcome, Sequence[str]], object]


class Child:
    """Starts a process when it is needed. device: `cuda` or `cpu`. on_figure: called with every
    outcome that got a figure, and the figure's path. module: what the process runs; it calls
    `serve`."""

    def __init__(
        self,
        device: str,
        on_figure: OnFigure = lambda outcome, path: None,
        module: Sequence[str] = ("-m", "octavo.bench.gpu.child"),
    ) -> None:
        self._device, self._on_figure, self._module = device, on_figure, module
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._received = b""

    def perform(self, part: Part, limit: float, outcome: Outcome) -> None:
        """Do a part. Raises `PartError`: it failed, the process ended, or the time was over."""
        until = time.monotonic() + limit
        if self._process is None:
            self._start()
        try:
            self._send({"do": part.kind, "given": part.given, "device": self._device})
            while True:
                message = self._receive(until, limit)
                if "path" in message:
                    outcome.take(message["value"], message["path"])
                    self._on_figure(outcome, message["path"])
                elif "error" in message:
                    if message["spoiled"]:
                        self.close()
                    raise PartError(message["error"])
                else:
                    return
        except OSError:
            raise PartError(f"the process ended {self._end()}") from None
        except KeyboardInterrupt:
            self.close()
            raise

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._received = b""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *self._module, str(theirs.fileno()), str(os.getpid())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=2,  # stray prints are messages
                start_new_session=True,  # it and its own children can be ended together
            )

    def _send(self, message: dict[str, Any]) -> None:
        assert self._socket is not None, "it was started"
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self, until: float, limit: float) -> dict[str, Any]:
        assert self._socket is not None, "it was started"
        while b"\n" not in self._received:
            ready, _, _ = select.select([self._socket], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                self.close()
                raise PartError(f"cut off after {limit:.0f} s")
            data = self._socket.recv(1 << 16)
            if not data:
                raise PartError(f"the process ended {self._end()}")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def _end(self) -> str:
        """How the process ended by itself."""
        process = self._process
        assert process is not None, "it was started"
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        status = process.returncode
        self.close()
        if status is not None and status < 0:
            return f"by signal {signal.Signals(-status).name}"
        return f"with exit status {status}"

    def close(self) -> None:
        """End the process and its children. More than one call is harmless."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def serve(connection: socket.socket) -> None:
    """In the process: parts until the parent closes the socket."""
    from octavo.bench.gpu.measure import PARTS

    with connection.makefile("rw") as lines:

        def send(message: dict[str, Any]) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        def tell(value: Any, *path: str) -> None:
            send({"path": path, "value": value})

        for line in lines:
            asked = json.loads(line)
            try:
                PARTS[asked["do"]](asked["given"], asked["device"], tell)
                send({"done": True})
            except BrokenPipeError:
                return
            except OctavoError as error:
                send({"error": str(error), "spoiled": _spoiled(error)})
            except Exception as error:
                send({"error": f"{type(error).__name__}: {error}", "spoiled": True})


def _spoiled(error: OctavoError) -> bool:
    """Whether the engine may have left something: not where it could not even be made."""
    from octavo.core.errors import ConfigError, PluginError, PluginFault

    return isinstance(error, PluginFault) or not isinstance(error, ConfigError | PluginError)


if __name__ == "__main__":
    watch(int(sys.argv[2]), lambda: None)  # nothing stays on the device, however the parent ends
    serve(socket.socket(fileno=int(sys.argv[1])))
