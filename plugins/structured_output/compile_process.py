"""The engine's end of the process that compiles grammars."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from octavo.kernels import kill_process, spawn_connected
from octavo.plugins.structured_output import wire

logger = logging.getLogger(__name__)

Answer = wire.Compiled | wire.Refused | wire.Dropped | wire.Broken

_MAIN = "octavo.plugins.structured_output.compile_main"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_ENVIRONMENT = {**dict.fromkeys(_ONE_THREAD, "1"), "TOKENIZERS_PARALLELISM": "false"}


class CompileProcess:
    """Started when it is made, and told by a first `send` what to start; ends with `close`, or with
    this process. on_answer: called with every answer, from a thread of its own. on_end: called from
    there, once, when the process has ended, with the reason."""

    def __init__(self, on_answer: Callable[[Answer], None], on_end: Callable[[str], None]) -> None:
        self._process, ours = spawn_connected(_MAIN, environment=_ENVIRONMENT, output=2)
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
            kill_process(self._process)
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
