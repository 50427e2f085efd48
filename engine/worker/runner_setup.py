"""What a model runner is made from: plain facts, and a factory for each implementation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from octavo.core.contracts.attention_backend import AttentionBackend, AttentionBackendContext
from octavo.core.contracts.executor import WorkerChoice
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.core.contracts.logits_processor import DeviceLogitsProcessor, LogitsProcessorContext
from octavo.core.contracts.model import AttentionFn, AttentionSpec, CausalLM
from octavo.core.contracts.sampler import Sampler, SamplerContext


@dataclass(frozen=True)
class RunnerSettings:
    """Plain facts."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    """Of the KV pool."""
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int | None = None
    """None: to be measured."""
    memory_utilization: float = 0.9
    num_threads: int | None = None
    """Of the CPU; None: as torch has it."""
    poison: bool = False
    """Fill fresh KV blocks with NaN, see `KVPool`."""


RegisterAttention = Callable[[int, AttentionSpec, torch.Tensor | None], AttentionFn]


@dataclass(frozen=True)
class RunnerFactories:
    """How implementations are created, each from the context that its kind defines."""

    model: Callable[[RegisterAttention], CausalLM]
    """Gets `ModelContext.attention` and builds the module."""
    load_weights: Callable[[CausalLM], None]
    """Fills that module."""
    attention_backend: Callable[[AttentionBackendContext], AttentionBackend]
    sampler: Callable[[SamplerContext], Sampler]
    graph_runner: Callable[[GraphRunnerContext], GraphRunner]
    logits_processors: Callable[
        [LogitsProcessorContext], Sequence[tuple[str, DeviceLogitsProcessor]]
    ] = field(default=lambda context: ())
    instead: dict[str, WorkerChoice] = field(default_factory=dict)
    """By kind, what was created in place of what could not be; these functions fill it."""
    graph_batch_sizes: tuple[int, ...] = ()
    """See `AttentionBackendContext`."""
    label: Callable[[object], str] = lambda implementation: type(implementation).__name__
    """See `GraphRunnerContext`."""
    blame: Callable[[BaseException], str] = lambda error: ""
    """See `GraphRunnerContext`."""
