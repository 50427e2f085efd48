"""Which implementation an exception comes from, and how long each takes.

Nothing here is on the path of a call unless times are asked for (`observability.plugin_times`).
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from octavo.core.errors import OctavoError, PluginFault, ReturnedWrong

if TYPE_CHECKING:
    from octavo.core.registry.sources import Registered


class Owners:
    """Whose the classes are of the objects that a registry has created."""

    def __init__(self) -> None:
        self._entries: dict[type, Registered] = {}

    def add(self, created: object, entry: Registered) -> None:
        """Note that `created` was created for `entry`."""
        self._entries[type(created)] = entry

    def label(self, created: object) -> str:
        """How messages call an object that may have been created here."""
        entry = self._entries.get(type(created))
        return entry.label if entry is not None else type(created).__name__

    def blame(self, error: BaseException) -> Registered | None:
        """The implementation whose method raised, or called what raised: the innermost one on the
        traceback. None: no implementation was being called."""
        found, trace = None, error.__traceback__
        while trace is not None:
            owner = self._entries.get(type(trace.tb_frame.f_locals.get("self")))
            found = owner or found
            trace = trace.tb_next
        return found

    def __enter__(self) -> None:
        """In a `with` block, an exception of an implementation becomes a `PluginFault` that names
        the implementation."""

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception | SystemExit):
            return
        wrong = error if isinstance(error, ReturnedWrong) else None
        if isinstance(error, OctavoError) and wrong is None:
            return
        culprit = (wrong and self._entries.get(type(wrong.made))) or self.blame(error)
        if culprit is not None:
            what = str(wrong) if wrong else f"{type(error).__name__}: {error}"
            raise culprit.error(PluginFault, f"{culprit} failed: {what}") from error


class PluginTimes:
    """Seconds and calls by implementation, each without what it spent inside others."""

    def __init__(self) -> None:
        self._totals: dict[str, list[float]] = {}
        self._local = threading.local()

    def watch(self, made: object, entry: Registered, contract: type) -> None:
        """Time the contract's methods that the object's class implements itself. An object that
        takes no attributes (`__slots__`) is left alone."""
        name = f"{entry.kind} {entry.name}"
        total = self._totals.setdefault(name, [0, 0.0])
        for method, declared in inspect.getmembers(contract, inspect.isfunction):
            own = inspect.getattr_static(type(made), method)
            if method.startswith("__") or own is declared or not inspect.isfunction(own):
                continue
            try:
                setattr(made, method, self._timed(getattr(made, method), total))
            except AttributeError:
                return

    def _timed(self, call: Callable[..., Any], total: list[float]) -> Callable[..., Any]:
        local = self._local

        @wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(local, "inside", 0.0)
            local.inside = 0.0
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                total[0] += 1
                total[1] += took - local.inside
                local.inside = outer + took

        return timed

    def summary(self) -> dict[str, dict[str, float]]:
        """`calls` and `seconds` by `KIND NAME`, the dearest first."""
        order = sorted(self._totals.items(), key=lambda item: -item[1][1])
        return {name: {"calls": total[0], "seconds": total[1]} for name, total in order}
