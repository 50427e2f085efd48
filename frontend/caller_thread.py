"""What `LLM` needs because its engine runs in the thread that calls it."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Turns:
    """`with turns:` waits for its turn; a thread that has it already goes on at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    def try_enter(self) -> bool:
        """Take the turn if nobody has it, not even this thread; True: leave it by `__exit__`.

        For what must not wait, as the finalizer of a generator, which the garbage collector may run
        in any thread and in the midst of anything.
        """
        if not self._lock.acquire(blocking=False):
            return False
        if self._depth:
            self._lock.release()
            return False
        self._depth = 1
        return True


class DelayedInterrupt:
    """Ctrl-C waits for the end of the block: a step cut short would leave the engine in an unknown
    state. A second Ctrl-C does not wait. Only in the main thread, and where Python's own handler is
    in place."""

    def __init__(self) -> None:
        self._pressed = False
        self._active = False

    def __enter__(self) -> None:
        here = threading.current_thread() is threading.main_thread()
        if here and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._press)
            self._active = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._active:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._pressed and kind is None:
            raise KeyboardInterrupt

    def _press(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            raise KeyboardInterrupt
        self._pressed = True
