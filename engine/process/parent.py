"""Dies with the parent: however a process's parent ends, the process ends within two seconds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_S = 1.0

_keep: list[object] = []  # handlers that C holds must not be collected


def watch(parent: int, clean_up: Callable[[], None]) -> None:
    """When process `parent` has ended, run `clean_up` (from another thread) and end this process
    with everything in its process group, whatever it is doing.

    A thread waits for it. Should the thread not get to run, because something holds the
    interpreter, the kernel ends the process a second later (Linux).
    """
    if sys.platform == "linux":
        _alarm_at_death()
    thread = threading.Thread(target=_wait, args=(parent, clean_up), name="parent", daemon=True)
    thread.start()


def die_at_once(parent: int) -> None:
    """Let the kernel kill this process when its parent ends (Linux; elsewhere by `watch`)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that call
            os._exit(1)
    else:
        watch(parent, lambda: None)


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
