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
        self._on_step = _bound(observers, "on_step")
        self._on_state = _bound(observers, "on_state")
        self._on_request = _bound(observers, "on_request")
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


def _bound(
    observers: Sequence[tuple[str, Observer]], method: str
) -> list[tuple[str, Callable[..., None]]]:
    """(name, method) of the observers that override it."""
    return [(n, getattr(o, method)) for n, o in observers if overrides(o, Observer, method)]


def overrides(implementation: object, contract: type, method: str) -> bool:
    """Whether an object's class has a method of its own in place of the contract's default."""
    return getattr(type(implementation), method) is not getattr(contract, method)
