"""`EngineProcess`: starts the engine process, watches it, starts it again, ends it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.core import errors
from octavo.core.errors import EngineDeadError, OctavoError
from octavo.engine.config import EngineConfig
from octavo.engine.process import wire
from octavo.engine.process.channel import Channel
from octavo.engine.process.folder import address, make_folder, remove_folder
from octavo.engine.process.link import EngineLink
from octavo.kernels import child_process

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that an engine gets to finish its step when it is told to stop."""

GRACE_S = 1.0
"""Added to the time that an engine may be silent, should this process have been late itself."""

LAST_WORDS_S = 0.25
"""How long after its end an engine's last message may still come."""

SAID_WHY, SAID_WHY_S = 1, 5.0
"""With this exit status an engine has said why it ended; on a busy machine, that may come late."""

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 60.0
HEALTHY_S = 600.0
"""An engine that ran this long may be started again as often as a new one."""


class EngineProcess(EngineLink):
    """Owns the engine process of a configuration. All methods but `close` belong to the loop.

    timeout_s: seconds without an answer after which an engine hangs, and is killed. restarts: how
    often an engine that has run is started again, with growing pauses. progress: gets a line for
    people now and then while the engine starts. pass_fds: open files that the engine inherits,
    under their numbers.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        timeout_s: float = 120.0,
        restarts: int = 0,
        progress: Callable[[str], None] = lambda _: None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self._config, self._timeout_s = config, timeout_s
        self._restarts, self._left = restarts, restarts
        self._progress = progress
        self._pass_fds = tuple(pass_fds)
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._run: _Run | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._backoff = FIRST_BACKOFF_S
        self._pings = 0
        self._started_at = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the engine process, while there is one."""
        return None if self._run is None else self._run.process.pid

    def launch(self) -> None:
        if not self._closed and self._run is None:
            self._spawn()

    def gone(self, client: bytes) -> None:
        """A front end has ended: so do its sequences."""
        if self._run is not None and self.address is not None:
            self._run.channel.send(wire.Gone(client))

    def close(self) -> None:
        self._closed = True
        if threading.get_ident() == self._thread or self._loop.is_closed():
            self._ask_to_stop()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._ask_to_stop)
        run = self._run
        if run is None:
            return
        if not run.exited.wait(CLOSE_S if self.address is not None else 0):
            run.kill()
            run.exited.wait()
        remove_folder(run.folder)
        if threading.get_ident() == self._thread or self._loop.is_closed():
            run.channel.close()
        else:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(run.channel.close)

    # ---- life of one process ---------------------------------------------------------------------

    def _spawn(self) -> None:
        folder = make_folder()
        try:
            run = self._run = _Run(folder, self._take, self._exited, self._pass_fds)
        except BaseException:
            remove_folder(folder)
            raise
        run.channel.send(wire.Start(plain(self._config), self._config.origin.rows()))

    def _spawn_again(self) -> None:
        try:
            self._spawn()
        except OSError as error:
            logger.error("the engine cannot be started again: %s", error)
            self._is_down(f"the engine stopped, and cannot be started again: {error}")

    def _take(self, message: Any) -> None:
        run = self._run
        assert run is not None, "a message from no engine"
        match message:
            case wire.Progress():
                self._progress(message.text)
            case wire.Settled():
                self._has_settled(message)
            case wire.Ready():
                self._started_at = self._loop.time()
                self._ping()
                self._is_up(address(run.folder), message.report)
            case wire.Died():
                run.died = message
                if "end" in self._timers:  # it was all that was waited for
                    self._ended(run)
            case wire.Pong():
                if message.id == self._pings:
                    self._later("silent", None)
                    self._later("ping", max(1.0, self._timeout_s / 4), self._ping)

    def _exited(self, run: _Run) -> None:
        """The process has ended; a message that says why may be under way."""
        run.channel.drain()
        if run.died is None and run.reason is None:
            late = SAID_WHY_S if run.process.returncode == SAID_WHY else LAST_WORDS_S
            self._later("end", late, lambda: self._ended(run))
        else:
            self._ended(run)

    def _ended(self, run: _Run) -> None:
        run.channel.drain()
        run.channel.close()
        remove_folder(run.folder)
        for name in ("ping", "silent", "end"):
            self._later(name, None)
        self._run = None
        if self._closed:
            self._has_failed(EngineDeadError("the engine was closed"))
            return
        reason = run.why(ran=self.address is not None)
        if not self._up.done():
            self._has_failed(run.error(reason))
            return
        if self.address is not None and self._loop.time() - self._started_at > HEALTHY_S:
            self._left, self._backoff = self._restarts, FIRST_BACKOFF_S
        logger.error("%s", reason)
        if self._left > 0:
            self._left -= 1
            reason += "; it is started again"
            self._later("restart", self._backoff, self._spawn_again)
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)
        elif self._restarts:
            reason += f"; it was started again {self._restarts} times"
        self._is_down(reason)

    # ---- hanging ---------------------------------------------------------------------------------

    def _ping(self) -> None:
        if self._run is not None:
            self._pings += 1
            self._run.channel.send(wire.Ping(self._pings))
            self._later("silent", self._timeout_s, self._silent)

    def _silent(self) -> None:
        self._later("silent", GRACE_S, self._hangs)

    def _hangs(self) -> None:
        run = self._run
        if run is not None:
            self._timers.pop("silent", None)
            run.channel.drain()
            if "silent" in self._timers or "ping" in self._timers:
                return  # it has answered
            run.reason = (
                f"the engine hung: it did not answer for {self._timeout_s:g} s "
                "(server.engine_timeout_s)"
            )
            run.kill()

    def _later(
        self, name: str, delay: float | None, call: Callable[[], None] | None = None
    ) -> None:
        """Set the timer of this name, or (delay None) cancel it."""
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()
        if delay is not None and call is not None:

            def fire() -> None:
                self._timers.pop(name, None)
                call()

            self._timers[name] = self._loop.call_later(delay, fire)

    def _ask_to_stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._run is not None and self.address is not None:
            self._run.channel.send(wire.Stop())


class _Run:
    """One engine process. died: what it said last. reason: why it was killed. exited: set when it
    has ended; `on_exit` is called in the loop then."""

    def __init__(
        self,
        folder: Path,
        on_message: Callable[[Any], None],
        on_exit: Callable[[_Run], None],
        pass_fds: tuple[int, ...],
    ) -> None:
        self.folder = folder
        self.died: wire.Died | None = None
        self.reason: str | None = None
        self.exited = threading.Event()
        self._loop, self._on_exit = asyncio.get_running_loop(), on_exit
        self.process = child_process.spawn(
            "octavo.engine.process", folder, os.getpid(), pass_fds=pass_fds
        )
        threading.Thread(target=self._wait, name="engine-exit", daemon=True).start()
        self.channel = Channel(address(folder), wire.OWNER, on_message)

    def _wait(self) -> None:
        self.process.wait()
        child_process.kill_process(self.process)  # what it left behind is of no use to anybody
        self.exited.set()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, self)

    def kill(self) -> None:
        """End the process and everything that it started."""
        child_process.kill_process(self.process)

    def why(self, *, ran: bool) -> str:
        """Why it ended."""
        if self.reason is not None:
            return self.reason
        if self.died is not None and self.died.kind == errors.PluginFault.__name__:
            return f"{self.died.message}; the engine stopped"
        if self.died is not None:
            return f"the engine stopped: {self.died.kind}: {self.died.message}"
        status = self.process.returncode
        when = "" if ran else " while it started"
        if status is not None and status < 0:
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"the engine process was killed by {name}{hint}{when}"
        return f"the engine process ended with status {status}{when}"

    def error(self, reason: str) -> Exception:
        """What a start that failed raises: the engine's own error where it was one of Octavo's."""
        if self.died is None:
            return EngineDeadError(reason)
        kind = getattr(errors, self.died.kind, None)
        if isinstance(kind, type) and issubclass(kind, OctavoError):
            with contextlib.suppress(TypeError):
                return kind(self.died.message)
        return EngineDeadError(f"{self.died.kind}: {self.died.message}")


def plain(config: EngineConfig) -> dict[str, Any]:
    """A configuration as another process may read it: what was given, without secrets."""
    secrets: dict[str, set[str]] = {}
    for section in type(config).model_fields:
        fields = getattr(type(getattr(config, section)), "model_fields", {})
        secrets[section] = {key for key, of in fields.items() if "SecretStr" in str(of.annotation)}
    data: dict[str, Any] = config.model_dump(mode="json", exclude_unset=True, exclude=secrets)
    return data
