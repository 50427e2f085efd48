"""Child processes of Octavo: how they are started, what they say, their limits, and their end.

A child runs `python -m MODULE` in a session of its own, so that a terminal's signals are its
parent's to handle and that it can be killed together with what it started. It ends with its parent,
however the parent ends. Messages are bytes with their length before them (`frame`), over a socket
that both hold; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.core.envvars import child_environment

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0

_keep: list[object] = []  # handlers that C holds must not be collected


# ---- in the parent ------------------------------------------------------------------------------


def spawn(
    module: str,
    *arguments: object,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    secrets: bool = False,
    output: Any = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module ARGUMENTS`.

    pass_fds: file descriptors that the child inherits under their numbers. environment: added to
    what children get. secrets: whether that includes API keys. output: where standard output
    and error go, a file or a descriptor; None: where this process's go.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
        env={**child_environment(secrets=secrets), **(environment or {})},
    )


def spawn_connected(
    module: str, *arguments: object, pass_fds: Sequence[int] = (), **options: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `python -m module FD PARENT ARGUMENTS`, FD being the child's end of the socket that is
    returned, PARENT this process's id. options: as for `spawn`."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            fds = (theirs.fileno(), *pass_fds)
            process = spawn(
                module, theirs.fileno(), os.getpid(), *arguments, pass_fds=fds, **options
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def kill_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a child and what it started in its session, without waiting. Harmless when it has
    ended. Processes that it started in sessions of their own end with it, a moment later."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def describe_exit(status: int) -> str:
    """How a process ended: `SIGKILL` or `status 1`."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


# ---- messages -----------------------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    """A message as it is sent: its length in bytes (4, little-endian), then the message."""
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message. Raises `EOFError` when the other side has gone."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        raise EOFError from None


def receive_frame(connection: socket.socket, until: float | None = None) -> bytes:
    """The next message. Raises `EOFError` when the other side has gone, `TimeoutError` when no
    whole message has come `until` then (of `time.monotonic`)."""
    (length,) = _LENGTH.unpack(_receive(connection, _LENGTH.size, until))
    return _receive(connection, length, until)


def _receive(connection: socket.socket, count: int, until: float | None) -> bytes:
    data = bytearray()
    while len(data) < count:
        if until is not None:
            left = max(0.0, until - time.monotonic())
            if not select.select([connection], [], [], left)[0]:
                raise TimeoutError
        try:
            more = connection.recv(min(count - len(data), 1 << 20))
        except ConnectionError:
            more = b""
        if not more:
            raise EOFError
        data += more
    return bytes(data)


# ---- in the child -------------------------------------------------------------------------------


def limit_memory(num_bytes: int) -> None:
    """At most so much address space beyond what this process has (Linux; elsewhere no limit)."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def ignore_signals() -> None:
    """Leave Ctrl-C and termination to the parent, with which this process ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def watch_parent(parent: int, clean_up: Callable[[], None]) -> None:
    """When process `parent` has ended, run `clean_up` (from another thread) and end this process
    with everything in its process group, whatever it is doing.

    A thread waits for it. Should the thread not get to run, because something holds the
    interpreter, the kernel ends the process a second later (Linux).
    """
    if sys.platform == "linux":
        _alarm_at_death()
    thread = threading.Thread(target=_wait, args=(parent, clean_up), name="parent", daemon=True)
    thread.start()


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (elsewhere than on Linux, a thread)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that call
            os._exit(1)
    else:
        watch_parent(parent, lambda: None)


def _alarm_at_death() -> None:
    """Have the kernel send SIGHUP (1) at the parent's death, handled in C by libc's alarm(), which
    the number of the signal tells to raise SIGALRM one second later; that one kills."""
    libc = ctypes.CDLL(None)
    handler = ctypes.cast(libc.alarm, ctypes.c_void_p)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(int(signal.SIGHUP), handler)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGHUP))
    _keep.append(libc)


def _wait(parent: int, clean_up: Callable[[], None]) -> None:
    _wait_for_death(parent)
    with contextlib.suppress(Exception):
        clean_up()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def _wait_for_death(parent: int) -> None:
    if hasattr(os, "pidfd_open"):
        try:
            descriptor = os.pidfd_open(parent)
        except ProcessLookupError:
            return
        except OSError:  # an old kernel, or a sandbox that forbids it
            pass
        else:
            if os.getppid() == parent:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll()
            return
    while os.getppid() == parent:
        time.sleep(_POLL_S)
