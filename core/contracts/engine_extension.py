"""Kind `engine_extension`: takes part in the step loop from outside: holds requests back, follows
plans and results, answers questions.

Runs in the engine process, on the engine thread. Every available provider with `rank` > 0 is part
of every engine, by descending rank (ties by name); then come those that the configuration lists
under `extensions`. A step calls only the methods that a class overrides. An exception stops the
engine with the extension's name, but a `RequestError` of `admit` refuses that request alone, and an
exception in a query is an error of who asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.logits_processor import HostLogitsProcessor
from octavo.core.contracts.observer import RequestRecord
from octavo.core.contracts.provider import Provider, hookspec
from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import RequestError
from octavo.core.messages import EngineOutputs, EngineRequest, StepPlan


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence that runs or waits, as it is at this moment."""

    handle: int
    request_id: str
    index: int
    """Which of the request's choices it is."""
    slot: int
    """-1 while it waits."""
    arrival: float
    """Seconds on the engine's clock."""
    num_prompt: int
    num_tokens: int
    """Known tokens: prompt and output, those of a step in flight included."""
    num_computed: int
    """Tokens whose KV is computed or planned; 0 while it waits."""
    max_tokens: int
    num_preemptions: int
    swapped: bool
    """Whether it waits with its KV on the host."""
    lost_to: tuple[int, str] | None
    """See `PreemptionRecord.lost_to`; None before the first preemption."""


class EngineState(ABC):
    """The scheduler's state, to read. Everything is as of the call."""

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps planned since start."""

    @property
    @abstractmethod
    def num_preemptions(self) -> int:
        """Preemptions since start."""

    @property
    @abstractmethod
    def num_free_slots(self) -> int:
        """Slots that no sequence holds."""

    @property
    @abstractmethod
    def max_num_batched_tokens(self) -> int:
        """The token budget of a step."""

    @abstractmethod
    def sequence(self, handle: int) -> SequenceView | None:
        """A sequence; None when it has ended or is not queued."""

    @abstractmethod
    def handles(self) -> Sequence[int]:
        """All sequences, those with a slot first, then by arrival."""

    @abstractmethod
    def next_waiting(self) -> int | None:
        """Handle of the sequence that the policy admits next; None when none waits."""

    @abstractmethod
    def waits_for_parent(self, handle: int) -> bool:
        """Whether a choice is not queued yet because the prompt it shares is being computed."""

    @abstractmethod
    def block_states(self) -> NDArray[np.uint8] | None:
        """`BlockState` of each usable KV block, uint8[num_blocks]; None when the KV cache manager
        does not say."""


def _no_tokenizer() -> Tokenizer:
    raise RequestError("this engine has no tokenizer")


@dataclass(frozen=True)
class EngineExtensionContext:
    """What an extension gets of the engine that it is made for."""

    state: EngineState
    clock: Callable[[], float]
    """The engine's clock, in seconds."""
    vocab_size: int
    """Rows of the model's head."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration as plain data, by section."""
    selections: Mapping[str, Any] = field(default_factory=dict)
    """By kind, the `octavo.core.registry.Selection` that the configuration makes; without kinds of
    which there may be several."""
    create: Callable[[Any, Any], Any] | None = None
    """Creates the implementation of a selection, given the context of its kind. From any thread."""
    make_tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    """The engine's tokenizer, loaded when first asked for. From any thread."""
    plugin_times: Callable[[], dict[str, Any]] = dict
    """Calls and seconds by implementation; empty unless `observability.plugin_times`."""


class EngineExtension(ABC):  # noqa: B024
    """Override what you need. All calls come from the engine thread."""

    # ---- admission gate: admit, poll and abort go together -----------------------------------

    def admit(self, request: EngineRequest) -> bool:
        """A request has come. True: queue it. False: it is held here until `poll` returns it.
        Raise `RequestError` to refuse it. Its length is within the engine's limits."""
        return True

    def poll(self, wait_s: float) -> Iterable[tuple[EngineRequest, RequestError | None]]:
        """The held requests that wait no longer, in order, each with None or with the error that
        refuses it; each is queued before the next is taken. Called before a step while requests
        are held. wait_s: seconds to wait for the
        first at most; 0 while the engine has other work."""
        return ()

    def abort(self, handles: Sequence[int]) -> Iterable[int]:
        """Forget those of these requests that are held here, and return their handles."""
        return ()

    # ---- events -----------------------------------------------------------------------------

    def on_queued(self, request: EngineRequest) -> None:  # noqa: B027
        """A request was queued with the scheduler."""

    def on_plan(self, plan: StepPlan | None) -> None:  # noqa: B027
        """The scheduler was asked for a step, and gave this one or None. Do not change it."""

    def on_commit(self, outputs: EngineOutputs) -> None:  # noqa: B027
        """A step was committed; these outputs go to the front ends. Do not change them."""

    def on_finished(self, record: RequestRecord) -> None:  # noqa: B027
        """A queued sequence has ended, whatever the reason."""

    # ---- asked once, when the engine is built -----------------------------------------------

    def host_processors(self) -> Sequence[HostLogitsProcessor]:
        """Logits processors that run in this process, after the configured ones."""
        return ()

    def queries(self) -> Mapping[str, Callable[..., Any]]:
        """What `EngineCore.query` answers, by name. Arguments and results are plain values:
        numbers, text, None, lists and mappings of them. Called between steps."""
        return {}

    # ---- from time to time ------------------------------------------------------------------

    def metrics(self) -> Mapping[str, Any]:
        """Plain values for `EngineCore.metrics`, by name."""
        return {}

    def close(self) -> None:  # noqa: B027
        """The engine stops. More than one call is harmless."""


class Spec:
    @hookspec
    def octavo_engine_extensions(self) -> list[Provider[EngineExtension]]:  # type: ignore[empty-body]
        """Providers of engine extensions.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `EngineExtensionContext`.
        """


KIND = Kind(
    "engine_extension", Spec, EngineExtension, EngineExtensionContext, "extensions", version="0"
)
