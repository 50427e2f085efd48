"""Kind `graph_runner`: how a forward pass is launched (eager, compiled, captured).

Runs in the worker, on the worker's thread.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.contracts.attention_backend import AttentionBackend, AttentionLayer
from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch

ForwardFn = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]
"""`(token_ids int64[T], positions int64[T]) -> hidden [T, E]`."""


DummyFn = Callable[[int, int], tuple["torch.Tensor", "torch.Tensor"]]
"""`(rows, tokens each) -> (token_ids int64[T], positions int64[T])`."""


DrawFn = Callable[["torch.Tensor"], tuple["torch.Tensor", "torch.Tensor"]]
"""`hidden [B, E] -> (token_ids int64[B], valid bool[B])`, as `SampledTokens`."""


def _no_batch(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions for a forward pass that plans no attention."""
    import torch

    return torch.zeros(rows * tokens, dtype=torch.int64), torch.arange(tokens).repeat(rows)


def _class_name(made: object) -> str:
    return type(made).__name__


def _nobody(error: BaseException) -> str:
    return ""


@dataclass(frozen=True)
class GraphRunnerContext:
    """What a factory gets."""

    forward: ForwardFn  # the eager pass, reading attention metadata that the core has planned
    model: torch.nn.Module  # for runners that compile parts of it
    device: torch.device
    graph_support: str  # of the attention backend
    max_num_seqs: int
    max_num_batched_tokens: int
    # Every layer's backend, which has planned the batch when `GraphRunner.forward` runs, and its
    # place in the KV pool, in layer order; the same object until the pool is allocated again.
    attention_layers: Callable[[], Sequence[tuple[AttentionBackend, AttentionLayer]]] = tuple
    attention_backends: Sequence[AttentionBackend] = ()  # one per KV group
    # Plan a batch of rows with so many tokens each that uses only the null block; returns its token
    # ids and positions, for a warm-up. A pass may use what the previous one derived from the same
    # plan: plan again before a pass that is recorded.
    dummy: DummyFn = _no_batch
    label: Callable[[object], str] = _class_name  # what messages call an object's plugin
    # The plugin whose method raised, or called what raised; empty: none.
    blame: Callable[[BaseException], str] = _nobody
    # Head and sampler for a decode-only batch without filters, for capture; None: not capturable.
    draw: DrawFn | None = None


@dataclass(frozen=True)
class Captured:
    """What a runner has recorded."""

    num_graphs: int = 0
    num_bytes: int = 0  # of device memory, as measured
    notes: tuple[str, ...] = ()  # what could not be recorded, for the startup report


class GraphRunner(ABC):
    """Runs forward passes. The core calls `compile`, measures a step, asks `estimate_bytes`, sizes
    and makes the KV pool, and calls `warm_up`; `invalidate` comes between two steps."""

    @staticmethod
    def batch_sizes(options: Any, max_num_seqs: int) -> tuple[int, ...]:
        """Numbers of rows of the decode-only batches that this runner would capture, for the
        attention backend's context. Called before anything is created. Default: none."""
        return ()

    def compile(self) -> dict[str, float]:
        """Compile before the first forward pass; returns seconds by name, for the report. The
        weights are loaded; the KV pool is a temporary one."""
        return {}

    def estimate_bytes(self) -> int:
        """Bytes of device memory that `warm_up` will take and keep, which the KV pool leaves free.
        The pool is the one of `compile`; nothing recorded now may stay."""
        return 0

    def warm_up(self) -> dict[str, float]:
        """Record passes, or do what else needs the KV pool; returns seconds by name, for the
        report. Called again when the pool is allocated again."""
        return {}

    def captured(self) -> Captured:
        """What the last `warm_up` has recorded."""
        return Captured()

    def invalidate(self) -> None:  # noqa: B027
        """Discard everything compiled, recorded or looked up: what a forward pass launches has
        changed (`CausalLM.forward_version`). Called between steps, when the device is idle; passes
        run here use only the null block, which is cleared afterwards. An exception stops the
        engine. Default: nothing, for a runner that calls `GraphRunnerContext.forward`."""

    def padded_rows(self, num_rows: int) -> int:
        """Rows that a decode-only batch of `num_rows` is padded to, at most `max_num_seqs`. The
        added ones use the null block and their results are dropped. Default: none; called only if
        overridden."""
        return num_rows

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        """Hidden states [T, E]. `num_decodes` equals T in a decode-only step."""

    def draw(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`GraphRunnerContext.draw` of what `forward` has just returned, [B, E] with padding, from
        a capture. The rows' parameters are in place; later calls must not write the tensors
        returned. None (the default): the core computes logits and samples. Called only if
        overridden, for decode-only batches without filters, masks, processors and logprobs."""
        return None


class Spec:
    @hookspec
    def octavo_graph_runners(self) -> list[Provider[GraphRunner]]:  # type: ignore[empty-body]
        """Providers of graph runners.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `GraphRunnerContext`.
        """


KIND = Kind("graph_runner", Spec, GraphRunner, GraphRunnerContext, "graph.runner", "1.3")
