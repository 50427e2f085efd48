"""One thread at a time, for objects whose calls may come from any thread."""

from __future__ import annotations

import threading


class Turns:
    """`with turns:` waits for its turn; a thread that has it already goes on at once.

    `vacant` is for what must not wait, as the finalizer of a generator, which the garbage collector
    may run in any thread and in the midst of anything.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        self._lock.release()

    def vacant(self) -> bool:
        """Take the turn if nobody has it, not even this thread; True: leave it by `__exit__`."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._depth:
            self._lock.release()
            return False
        self._depth = 1
        return True
