"""What a model runner is made of: plain facts, and how each part is created."""

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
    """Plain facts. kv_dtype: of the pool. max_num_batched_tokens: None when it shall be found.
    num_threads: of the CPU, None to leave it. poison: see `KVPool`."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int | None = None
    memory_utilization: float = 0.9
    num_threads: int | None = None
    poison: bool = False


RegisterAttention = Callable[[int, AttentionSpec, torch.Tensor | None], AttentionFn]


@dataclass(frozen=True)
class RunnerParts:
    """How the runner's parts are made, each by the context that its kind defines.

    model: gets `ModelContext.attention` and builds the module. load_weights: fills it. instead: by
    kind, what was made in place of what could not be made; filled by these functions.
    graph_batch_sizes: see `AttentionBackendContext`. label, blame: see `GraphRunnerContext`.
    """

    model: Callable[[RegisterAttention], CausalLM]
    load_weights: Callable[[CausalLM], None]
    attention_backend: Callable[[AttentionBackendContext], AttentionBackend]
    sampler: Callable[[SamplerContext], Sampler]
    graph_runner: Callable[[GraphRunnerContext], GraphRunner]
    logits_processors: Callable[
        [LogitsProcessorContext], Sequence[tuple[str, DeviceLogitsProcessor]]
    ] = field(default=lambda context: ())
    instead: dict[str, WorkerChoice] = field(default_factory=dict)
    graph_batch_sizes: tuple[int, ...] = ()
    label: Callable[[object], str] = lambda made: type(made).__name__
    blame: Callable[[BaseException], str] = lambda error: ""
