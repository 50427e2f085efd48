"""Scheduler policy `composed`, written `policy: [outer, inner]`: the outer policy orders classes,
the inner one orders within a class.

The outer policy's next request names the class; the inner policy of that class names the request.
So a class is served when its first request is due by the outer policy's order (ageing included),
and the inner policy alone decides who of the class it is. Victims likewise: the outer policy's
first victim names the class, the inner one names the request. Of more than two the rest is the
inner one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from octavo.core.config.models import ImplementationConfig
from octavo.core.contracts.provider import Options
from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.core.errors import ConfigError

_MAX_IDLE_CLASSES = 256
"""Inner policies that are kept, with what they have counted, though nobody of the class waits."""


class ComposedOptions(Options):
    """The policies to compose."""

    policies: list[ImplementationConfig] = Field(
        min_length=2, description="Policies, the outermost first; all but the last need classes."
    )

    def choices(self) -> list[ImplementationConfig]:
        """The implementations that this is made of."""
        return self.policies

    def check_part(self, index: int, factory: Any) -> None:
        """Refuse a policy without classes that others stand inside of, before anything is made."""
        if index < len(self.policies) - 1 and isinstance(factory, type):
            _check_classes(self.policies[index].name, factory)


def _overrides(policy: type[SchedulerPolicy], method: str) -> bool:
    return getattr(policy, method) is not getattr(SchedulerPolicy, method)


def _check_classes(name: str, policy: type[SchedulerPolicy]) -> None:
    if not _overrides(policy, "class_of") or not _overrides(policy, "classes"):
        raise ConfigError(
            f"'{name}' orders single requests and has no classes: expected it last, or a policy"
            " with classes (priority, fair, deadline) in its place",
            path="scheduler.policy",
        )


class ComposedPolicy(SchedulerPolicy):
    """See the module. One inner policy a class, made when the class first appears."""

    def __init__(self, options: ComposedOptions, context: SchedulerPolicyContext) -> None:
        outer, *rest = options.policies
        self._outer = context.make(outer)
        _check_classes(outer.name, type(self._outer))
        inner = rest[0] if len(rest) == 1 else {"name": "composed", "policies": rest}
        self._context, self._choice = context, inner
        self._model = context.make(inner)  # says what inner policies can do, and fails at start
        self._stateful = _overrides(type(self._model), "on_step")
        self._spare: list[SchedulerPolicy] = []  # empty ones that remember nothing
        self._inner: dict[Hashable, SchedulerPolicy] = {}
        self._class_of: dict[int, Hashable] = {}  # by handle of a waiting request

    # ---- queue ----------------------------------------------------------------------------------

    def add(self, request: WaitingRequest) -> None:
        name = self._outer.class_of(request)
        inner = self._inner.get(name)
        if inner is None:
            inner = self._spare.pop() if self._spare else self._context.make(self._choice)
            self._forget_idle()
            self._inner[name] = inner
        inner.add(request)
        self._outer.add(request)
        self._class_of[request.handle] = name

    def _forget_idle(self) -> None:
        if len(self._inner) < 2 * _MAX_IDLE_CLASSES:
            return
        idle = [name for name, inner in self._inner.items() if not len(inner)]
        for name in idle[:-_MAX_IDLE_CLASSES]:
            del self._inner[name]

    def _leave(self, handle: int) -> SchedulerPolicy:
        """The policy of a request that is about to leave it."""
        name = self._class_of.pop(handle)
        inner = self._inner[name]
        if len(inner) == 1 and not self._stateful:
            self._spare.append(self._inner.pop(name))
        return inner

    def remove(self, handle: int) -> bool:
        if handle not in self._class_of:
            return False
        self._leave(handle).remove(handle)
        return self._outer.remove(handle)

    def peek(self) -> WaitingRequest | None:
        first = self._outer.peek()
        return None if first is None else self._inner[self._class_of[first.handle]].peek()

    def pop(self) -> WaitingRequest:
        request = self.peek()
        assert request is not None, "pop from an empty queue"
        self._leave(request.handle).pop()
        self._outer.take(request)
        return request

    def take(self, request: WaitingRequest) -> None:
        self._leave(request.handle).take(request)
        self._outer.take(request)

    def __len__(self) -> int:
        return len(self._class_of)

    def waiting(self) -> Iterable[WaitingRequest]:
        return self._outer.waiting()

    def class_of(self, request: WaitingRequest) -> Hashable:
        return self._outer.class_of(request)

    def classes(self, view: RunningView) -> NDArray[np.int64] | None:
        return self._outer.classes(view)

    # ---- the running ----------------------------------------------------------------------------

    def _groups(self, view: RunningView) -> tuple[NDArray[np.intp], int]:
        """A dense class number of each running request, intp[B], and how many there are."""
        classes = self._outer.classes(view)
        assert classes is not None, "the outer policy has classes"
        distinct, group = np.unique(classes, return_inverse=True)
        return group, len(distinct)

    def _each(self, view: RunningView) -> Iterator[tuple[NDArray[np.intp], SchedulerPolicy]]:
        """The rows of each class that runs, and its policy."""
        group, count = self._groups(view)
        for number in range(count):
            rows = np.flatnonzero(group == number)
            yield rows, self._inner_of(view, int(rows[0]))

    def _inner_of(self, view: RunningView, row: int) -> SchedulerPolicy:
        name = self._outer.class_of(
            WaitingRequest(
                int(view.handles[row]),
                float(view.arrival[row]),
                int(view.num_tokens[row]),
                int(view.priority[row]),
                view.user_names[view.user[row]],
            )
        )
        return self._inner.get(name, self._model)

    def _nested(
        self, view: RunningView, outer: NDArray[np.float64], inner: NDArray[np.float64]
    ) -> NDArray[np.intp]:
        """Positions by class, a class standing where its largest outer key is, then by inner
        key; ascending."""
        group, count = self._groups(view)
        best = np.full(count, -np.inf)
        np.maximum.at(best, group, outer)
        return np.lexsort((inner, group, best[group]))

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        inner = np.empty(len(view.slots))
        for rows, policy in self._each(view):
            inner[rows] = policy.victim_keys(view.rows(rows))
        keys = np.empty(len(view.slots))
        keys[self._nested(view, self._outer.victim_keys(view), inner)] = np.arange(len(keys))
        return keys

    def order(self, view: RunningView) -> NDArray[np.intp] | None:
        if len(view.slots) < 2:
            return None
        outer = _places(self._outer.order(view), len(view.slots))
        inner = np.zeros(len(view.slots))
        for rows, policy in self._each(view):
            inner[rows] = _places(policy.order(view.rows(rows)), len(rows))
        return self._nested(view, -outer, -inner)[::-1]

    def cap(self, view: RunningView, want: NDArray[np.int64]) -> NDArray[np.int64] | None:
        caps = self._outer.cap(view, want)
        if not _overrides(type(self._model), "cap"):
            return caps
        caps = want.copy() if caps is None else np.minimum(caps, want)
        for rows, policy in self._each(view):
            own = policy.cap(view.rows(rows), want[rows])
            if own is not None:
                caps[rows] = np.minimum(caps[rows], own)
        return caps

    def admit_cap(self, request: WaitingRequest, want: int) -> int:
        inner = self._inner[self._class_of[request.handle]]
        return inner.admit_cap(request, min(want, self._outer.admit_cap(request, want)))

    def preempts(self, request: WaitingRequest, view: RunningView) -> int | None:
        slot = self._outer.preempts(request, view)
        if slot is not None or not _overrides(type(self._model), "preempts"):
            return slot
        for rows, policy in self._each(view):
            if policy is self._inner[self._class_of[request.handle]]:
                return policy.preempts(request, view.rows(rows))
        return None

    def on_step(self, view: RunningView, scheduled: NDArray[np.int64]) -> None:
        if _overrides(type(self._outer), "on_step"):
            self._outer.on_step(view, scheduled)
        if self._stateful:
            for rows, policy in self._each(view):
                policy.on_step(view.rows(rows), scheduled[rows])


def _places(order: NDArray[np.intp] | None, count: int) -> NDArray[np.float64]:
    """Where each row stands in an order."""
    places = np.arange(count, dtype=np.float64)
    if order is not None:
        places[order] = np.arange(count)
    return places
