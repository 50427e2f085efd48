"""Which plugin an exception comes from, and what plugins cost: kept by the registry that made them.

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
    from octavo.core.plugin_loading import Registered


class Made:
    """The classes of what a registry has made, and whose they are."""

    def __init__(self) -> None:
        self._entries: dict[type, Registered] = {}

    def add(self, made: object, entry: Registered) -> None:
        """`made` was made for `entry`."""
        self._entries[type(made)] = entry

    def entry(self, made: object) -> Registered | None:
        """What it was made for, when it was made here."""
        return self._entries.get(type(made))

    def label(self, made: object) -> str:
        """How messages call something that may have been made here."""
        entry = self._entries.get(type(made))
        return entry.label if entry is not None else type(made).__name__

    def blame(self, error: BaseException) -> Registered | None:
        """The implementation whose method raised, or called what raised: the innermost one on the
        traceback. None: no implementation was being called."""
        found, trace = None, error.__traceback__
        while trace is not None:
            owner = self._entries.get(type(trace.tb_frame.f_locals.get("self")))
            found = owner or found
            trace = trace.tb_next
        return found


class Blaming:
    """`with blaming:` an exception of an implementation becomes a `PluginFault` that names it."""

    def __init__(self, made: Made) -> None:
        self._made = made

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is None or not isinstance(error, Exception | SystemExit):
            return
        if isinstance(error, OctavoError) and not isinstance(error, ReturnedWrong):
            return
        culprit = self._made.blame(error)
        if isinstance(error, ReturnedWrong):
            culprit = self._made.entry(error.made) or culprit
        if culprit is None:
            return
        what = (
            str(error) if isinstance(error, ReturnedWrong) else f"{type(error).__name__}: {error}"
        )
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
