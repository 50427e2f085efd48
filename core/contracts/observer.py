"""Kind `observer`: sees steps, requests and capacity; changes nothing.

Runs on the engine thread, after a step was committed and before its outputs are handed over: be
quick. Several may be configured; each gets every event. An exception is logged once with the
observer's name, counted, and never stops the engine.
"""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.kv_cache_manager import KVStats
from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True, slots=True)
class PreemptionRecord:
    """A sequence that was preempted."""

    handle: int
    request_id: str
    action: str  # `recompute` or `swap`
    num_computed: int  # tokens whose KV it had
    num_blocks: int  # that held them
    reason: str  # the preemption policy's, or why a swap became a recompute
    lost_to: tuple[int, str] | None = None  # handle it gave way to, which lacked `slot` or `blocks`


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times are seconds."""

    step: int
    started: float
    schedule_s: float
    prepare_s: float
    forward_s: float
    sample_s: float
    commit_s: float
    num_running: int
    num_waiting: int
    num_tokens: int  # computed
    num_prefill: int  # of these, tokens of prompts or recomputed
    num_sampled: int  # produced
    num_preempted: int  # since start
    kv: KVStats  # queries and hits of first admissions only
    preemptions: tuple[PreemptionRecord, ...] = ()  # of this step's plan
    swapped_in: tuple[int, ...] = ()  # handles brought back from the host
    num_copies: int = 0  # of blocks
    copy_s: float = 0.0  # of copies between host and device
    num_swapped: int = 0  # sequences whose KV is on the host


@dataclass(frozen=True, slots=True)
class StateRecord:
    """What there is between two steps. Fields as in `StepRecord`."""

    num_running: int
    num_waiting: int
    num_swapped: int
    kv: KVStats


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request. Times are seconds on the engine's clock."""

    request_id: str
    handle: int
    arrival: float
    admitted: float | None
    first_token: float | None  # None: no token was produced
    finished: float
    num_prompt: int
    num_output: int
    num_cached: int
    num_preemptions: int
    finish_reason: str  # `stop`, `length`, `abort` or `error`
    index: int = 0  # which of the request's choices


@dataclass(frozen=True)
class ObserverContext:
    """What a factory gets."""

    report: dict[str, Any]  # the startup report: model, capacity, implementations


class Observer(ABC):  # noqa: B024
    """Override what you want to see; the core calls only what is overridden."""

    def on_step(self, record: StepRecord) -> None:  # noqa: B027
        """After every step."""

    def on_state(self, record: StateRecord) -> None:  # noqa: B027
        """When sequences ended while no step ran (aborts)."""

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


KIND = Kind("observer", Spec, Observer, ObserverContext, "observers")
