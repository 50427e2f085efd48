"""Kind `scheduler_policy`: who is admitted next, who gives way, how large a chunk may be.

Mechanics (budgets, slots, blocks, state) belong to `octavo.engine.scheduler`; a policy orders.
It runs in the engine process, on the engine thread, between steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request without a slot, as a policy sees it."""

    handle: int  # unique in the engine
    arrival: float  # seconds on the engine's clock
    num_tokens: int  # known: prompt, and output so far after a preemption
    priority: int = 0  # lower goes first
    user: str | None = None  # for fairness; None: anonymous
    num_preemptions: int = 0  # how often it lost its slot
    num_computed: int = 0  # tokens whose KV waits in the host pool
    num_cached: int = 0  # tokens in the prefix cache when it was queued; may change until admission

    @property
    def num_remaining(self) -> int:
        """Tokens of prefill that are likely left."""
        return self.num_tokens - max(self.num_computed, self.num_cached)


@dataclass(frozen=True, slots=True)
class RunningView:
    """Read-only columns of the running requests, all of length B in one order."""

    slots: NDArray[np.intp]
    handles: NDArray[np.int64]
    num_tokens: NDArray[np.int64]  # known tokens
    num_computed: NDArray[np.int64]  # tokens whose KV is computed or planned
    num_prompt: NDArray[np.int64]
    priority: NDArray[np.int64]
    arrival: NDArray[np.float64]  # seconds
    user: NDArray[np.int64]  # index into `user_names`
    user_names: list[str | None]  # grows; another list once users were renumbered
    now: float  # seconds on the engine's clock

    def rows(self, index: NDArray[Any]) -> RunningView:
        """The same columns of some of the requests; index: intp[m] or bool[B]."""
        columns: dict[str, Any] = {name: getattr(self, name)[index] for name in _COLUMNS}
        for column in columns.values():
            column.setflags(write=False)
        return RunningView(**columns, user_names=self.user_names, now=self.now)


_COLUMNS = (
    "slots",
    "handles",
    "num_tokens",
    "num_computed",
    "num_prompt",
    "priority",
    "arrival",
    "user",
)


def _alone(choice: Any) -> SchedulerPolicy:
    raise ValueError(f"this engine composes no policies, but one asks for {choice!r}")


@dataclass(frozen=True)
class SchedulerPolicyContext:
    """What a factory gets."""

    max_num_seqs: int  # slots
    max_num_batched_tokens: int  # per step
    clock: Callable[[], float]  # seconds, monotonic
    # Another policy for the same engine, from a name or a mapping with `name` and options, for
    # policies composed of others. Raises `PluginError`.
    make: Callable[[Any], SchedulerPolicy] = field(default=_alone)


class SchedulerPolicy(ABC):
    """Orders requests and owns the waiting queue. The order of two waiting requests must not change
    with time (age by arrival, not by "now"), so that a heap suffices."""

    @abstractmethod
    def add(self, request: WaitingRequest) -> None:
        """Queue a request: new, or preempted (`num_preemptions` > 0), which keeps its place."""

    @abstractmethod
    def remove(self, handle: int) -> bool:
        """Forget a waiting request (it was aborted). False when it is not here."""

    @abstractmethod
    def peek(self) -> WaitingRequest | None:
        """The next request to admit; None only when nothing waits (hold a request back by an
        `admit_cap` of 0). Called while a slot, tokens and blocks are free, and to find a victim for
        it, so 10,000 waiting requests cost a step nothing."""

    @abstractmethod
    def pop(self) -> WaitingRequest:
        """Take out what `peek` returned; the scheduler has just admitted it."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of waiting requests."""

    def order(self, view: RunningView) -> NDArray[np.intp] | None:
        """Permutation of `range(B)`: who gets tokens first. None: decodes, then by admission.
        Called only when budget or blocks may not suffice."""
        return None

    def cap(self, view: RunningView, want: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Maximum tokens of each running request this step, given what each wants (int64[B], at
        least 1). None: no cap. Called only in steps with prefill. When nothing else runs, one row
        gets one token whatever the cap."""
        return None

    def admit_cap(self, request: WaitingRequest, want: int) -> int:
        """Largest first chunk of a request being admitted, at most `want`; 0: not this step
        (taken as 1 when nothing runs)."""
        return want

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        """One key per running request, float64[B]; the largest is preempted first. Called only
        when blocks run out. Default: the latest arrival."""
        return view.arrival

    def preempts(self, request: WaitingRequest, view: RunningView) -> int | None:
        """The slot of a running request that must give way to `request`, which `peek` returned and
        which finds no slot or no blocks; None: it waits. Asked again until the request fits. The
        answer may depend only on `request` and on who runs: a None holds until either changes.
        The one preempted must come after `request` in the queue, otherwise the two preempt each
        other forever."""
        return None

    def take(self, request: WaitingRequest) -> None:
        """Take out this request of the queue, which a composition admitted and which need not be
        the next one; account for it as `pop` does."""
        self.remove(request.handle)

    def class_of(self, request: WaitingRequest) -> Hashable:
        """The class that the request belongs to, within which this policy lets another one order
        (`policy: [this, other]`). None: this policy has no classes."""
        return None

    def classes(self, view: RunningView) -> NDArray[np.int64] | None:
        """A number for the class of each running request, int64[B], equal where `class_of` is.
        None: this policy has no classes."""
        return None

    def on_step(self, view: RunningView, scheduled: NDArray[np.int64]) -> None:  # noqa: B027
        """Called once per step with the tokens that each running request was given (int64[B]);
        skipped for policies that do not override it."""

    def waiting(self) -> Iterable[WaitingRequest]:
        """All waiting requests in any order, for shutdown and inspection."""
        return ()


class Spec:
    @hookspec
    def octavo_scheduler_policies(self) -> list[Provider[SchedulerPolicy]]:  # type: ignore[empty-body]
        """Providers of scheduler policies.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `SchedulerPolicyContext`.
        """


KIND = Kind(
    "scheduler_policy", Spec, SchedulerPolicy, SchedulerPolicyContext, "scheduler.policy", "1.1"
)
