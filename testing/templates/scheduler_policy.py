"""Scheduler policy `example`: first come, first served, with a lane for short prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.scheduler_policy import (
    SchedulerPolicy,
    SchedulerPolicyContext,
    WaitingRequest,
)


class ExampleOptions(Options):
    """When a prompt is short, and how often the long ones get their turn."""

    short_tokens: int = Field(default=64, ge=0, description="Prompts up to this length are short.")
    long_every: int = Field(
        default=3, ge=1, description="One long prompt goes after so many short ones."
    )


class ExamplePolicy(SchedulerPolicy):
    """Two queues by order of arrival. Short prompts go first, but after `long_every` of them a long
    one has its turn, so nothing starves."""

    def __init__(self, options: ExampleOptions, context: SchedulerPolicyContext) -> None:
        self._options = options
        self._short: OrderedDict[int, WaitingRequest] = OrderedDict()
        self._long: OrderedDict[int, WaitingRequest] = OrderedDict()
        self._in_a_row = 0

    def add(self, request: WaitingRequest) -> None:
        short = request.num_tokens <= self._options.short_tokens
        queue = self._short if short else self._long
        queue[request.handle] = request
        if request.num_preemptions:
            queue.move_to_end(request.handle, last=False)  # it has waited before

    def remove(self, handle: int) -> bool:
        found = self._short.pop(handle, None) or self._long.pop(handle, None)
        return found is not None

    def peek(self) -> WaitingRequest | None:
        queue = self._next_queue()
        return next(iter(queue.values()), None)

    def pop(self) -> WaitingRequest:
        queue = self._next_queue()
        self._in_a_row = self._in_a_row + 1 if queue is self._short else 0
        return queue.popitem(last=False)[1]

    def _next_queue(self) -> OrderedDict[int, WaitingRequest]:
        long_turn = self._in_a_row >= self._options.long_every
        first, second = (self._long, self._short) if long_turn else (self._short, self._long)
        return first or second

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def waiting(self) -> Iterable[WaitingRequest]:
        return [*self._short.values(), *self._long.values()]
