"""Kind `observer`: sees steps, requests and capacity; changes nothing.

Runs in the engine process, on the engine thread, when a step was committed and before its outputs
are handed over: be quick. Several may be configured; each gets every event. An exception in an
observer is logged once with its name, counted, and never stops the engine.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts.kv_cache_manager import KVStats
from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """A sequence that gave way. action: what was done, `recompute` or `swap`. num_computed: tokens
    whose KV it had, in `num_blocks` blocks. reason: the preemption policy's, or why a swap became a
    recompute. lost_to: handle of the sequence that it gave way to, and what that lacked, `slot` or
    `blocks`."""

    handle: int
    request_id: str
    action: str
    num_computed: int
    num_blocks: int
    reason: str
    lost_to: tuple[int, str] | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times are seconds. num_tokens: tokens computed; num_prefill of them belong to
    prompts (or are recomputed). num_sampled: tokens produced. num_preempted: preemptions since
    start. preemptions: those that this step's plan made. swapped_in: handles that it brought back
    from the host. num_copies: block copies that it ran, copy_s: how long those between host and
    device took. num_swapped: sequences whose KV is on the host. kv: its prefix queries and hits are
    those of first admissions; a sequence that comes back after a preemption counts no more."""

    step: int
    started: float
    schedule_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    commit_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_prefill: int
    num_sampled: int
    num_preempted: int
    kv: KVStats
    preemptions: tuple[PreemptionRecord, ...] = ()
    swapped_in: tuple[int, ...] = ()
    num_copies: int = 0
    copy_s: float = 0.0
    num_swapped: int = 0


@dataclass(frozen=True, slots=True)
class StateRecord:
    """What there is between two steps. Fields as in `StepRecord`."""

    num_running: int
    num_waiting: int
    num_swapped: int
    kv: KVStats


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request. Times are seconds on the engine's clock; first_token is None when none
    was produced. finish_reason: `stop`, `length`, `abort` or `error`. index: which of the
    request's choices it is."""

    request_id: str
    handle: int
    arrival: float
    admitted: float | None
    first_token: float | None
    finished: float
    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    finish_reason: str
    index: int = 0


@dataclass(frozen=True)
class ObserverContext:
    """report: the startup report as a plain mapping (model, capacity, plugins chosen)."""

    report: dict[str, Any]


class Observer(ABC):  # noqa: B024
    """Override what you want to see; the core calls only what is overridden."""

    def on_step(self, record: StepRecord) -> None:  # noqa: B027
        """After every step."""

    def on_state(self, record: StateRecord) -> None:  # noqa: B027
        """When sequences ended while no step ran (aborts), so that no step tells of it."""

    def on_request(self, record: RequestRecord) -> None:  # noqa: B027
        """When a request has finished, whatever the reason."""

    def close(self) -> None:  # noqa: B027
        """The engine stops."""


class Spec:
    @hookspec
    def octavo_observers(self) -> list[Provider[Observer]]:  # type: ignore[empty-body]
        """Providers of observers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ObserverContext`.
        """
