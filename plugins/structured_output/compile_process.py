"""The engine's end of the process that compiles grammars."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from octavo.core.envvars import child_environment
from octavo.plugins.structured_output import wire

logger = logging.getLogger(__name__)

Answer = wire.Compiled | wire.Refused | wire.Dropped | wire.Broken

_MAIN = "octavo.plugins.structured_output.compile_main"


class CompileProcess:
    """Started when it is made, and told by a first `send` what to start; ends with `close`, or with
    this process. on_answer: called with every answer, from a thread of its own. on_end: called from
    there, once, when the process has ended, with the reason."""

    def __init__(self, on_answer: Callable[[Answer], None], on_end: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MAIN, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=_environment(),
            )
            self._connection = Connection(ours.detach())
        self._on_answer, self._on_end = on_answer, on_end
        self._lock = threading.Lock()
        self.ended = False
        threading.Thread(target=self._receive, name="octavo-grammars", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: wire.ToCompiler) -> None:
        """Hand over a message; may wait until the process reads it. Should the process have ended,
        `on_end` says so."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(wire.encode(message))

    def close(self) -> None:
        """End the process and what it forked. More than one call is harmless."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self.ended = True

    def _receive(self) -> None:
        try:
            while True:
                self._on_answer(wire.from_compiler.decode(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        except Exception:
            logger.exception("what came from the process that compiles grammars is wrong")
        self.close()
        self._connection.close()
        self._on_end(f"ended with status {self._process.returncode}")


def _environment() -> dict[str, str]:
    """For a process that computes on one thread."""
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**child_environment(), **one_thread, "TOKENIZERS_PARALLELISM": "false"}
