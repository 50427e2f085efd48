"""Hands events to observers, and keeps their faults from the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from octavo.core.contracts.observer import Observer, RequestRecord, StateRecord, StepRecord

logger = logging.getLogger(__name__)


class Observers:
    """Calls only what an observer overrides. `num_failures` counts exceptions by observer name."""

    def __init__(self, observers: Sequence[tuple[str, Observer]]) -> None:
        self._all = observers
        self._on_step = [(n, o.on_step) for n, o in observers if _overrides(o, "on_step")]
        self._on_state = [(n, o.on_state) for n, o in observers if _overrides(o, "on_state")]
        self._on_request = [(n, o.on_request) for n, o in observers if _overrides(o, "on_request")]
        self.num_failures: dict[str, int] = {}

    @property
    def want_steps(self) -> bool:
        return bool(self._on_step)

    @property
    def want_states(self) -> bool:
        return bool(self._on_state)

    def step(self, record: StepRecord) -> None:
        for name, call in self._on_step:
            self._guard(name, call, record)

    def state(self, record: StateRecord) -> None:
        for name, call in self._on_state:
            self._guard(name, call, record)

    def request(self, record: RequestRecord) -> None:
        for name, call in self._on_request:
            self._guard(name, call, record)

    def close(self) -> None:
        for name, observer in self._all:
            self._guard(name, observer.close)

    def _guard(self, name: str, call: Callable[..., None], *event: Any) -> None:
        try:
            call(*event)
        except (Exception, SystemExit):
            count = self.num_failures.get(name, 0)
            self.num_failures[name] = count + 1
            if not count:
                logger.exception("observer '%s' failed; further failures are only counted", name)


def _overrides(observer: Observer, method: str) -> bool:
    return getattr(type(observer), method) is not getattr(Observer, method)
