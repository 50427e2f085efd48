"""Attention backends of the KV groups, the pool that they accept, and how large it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import get_args

import torch

from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    KVDim,
    KVLayout,
)
from octavo.core.contracts.executor import DeviceMemory
from octavo.core.contracts.model import AttentionSpec, KVSpec
from octavo.core.contracts.provider import Platform
from octavo.core.errors import ContractError, PluginUnavailable
from octavo.engine.worker.kv_layout import choose_layout
from octavo.engine.worker.kv_pool import KVPool
from octavo.engine.worker.profile import CUDA_BUDGET, kv_budget_cpu, kv_budget_cuda
from octavo.engine.worker.runner_setup import RunnerFactories, RunnerSettings

Backends = list[tuple[int, AttentionBackend]]
"""(group, backend), in group order."""


def make_backends(
    settings: RunnerSettings,
    factories: RunnerFactories,
    kv_specs: Sequence[KVSpec],
    attention_specs: Mapping[int, AttentionSpec],
) -> Backends:
    """One backend a group. attention_specs: by layer. Raises `PluginUnavailable` for a layer that
    the backend cannot compute."""
    num_groups = 1 + max((spec.group for spec in kv_specs), default=0)
    made: Backends = []
    for group in range(num_groups):
        specs = tuple(
            dict.fromkeys(attention_specs[spec.layer] for spec in kv_specs if spec.group == group)
        )
        backend = factories.attention_backend(
            AttentionBackendContext(
                specs=specs,
                dtype=settings.dtype,
                kv_dtype=settings.kv_dtype,
                device=settings.device,
                block_size=settings.block_size,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens or CUDA_BUDGET,
                max_model_len=settings.max_model_len,
                graph_batch_sizes=factories.graph_batch_sizes,
            )
        )
        platform = Platform(settings.device.type, _capability(settings.device))
        for spec in specs:
            reason = backend.supports(spec, platform)
            if reason:
                raise PluginUnavailable(
                    f"the attention backend cannot compute this model: {reason}",
                    kind="attention_backend",
                )
        made.append((group, backend))
    return made


def layouts_of(
    settings: RunnerSettings,
    backends: Backends,
    kv_specs: Sequence[KVSpec],
    attention_specs: Mapping[int, AttentionSpec],
    label: Callable[[object], str] = lambda backend: type(backend).__name__,
) -> list[KVLayout]:
    """The first layout that each layer's backend and the settings agree on. label: how messages
    call a backend. Raises `ContractError` for a layout that is none."""
    by_group = dict(backends)
    chosen = []
    for spec in kv_specs:
        backend = by_group[spec.group]
        layouts = backend.kv_layouts(attention_specs[spec.layer])
        for layout in layouts:
            if sorted(map(str, layout.dims)) != sorted(get_args(KVDim)):
                raise ContractError(
                    f"attention_backend '{label(backend)}': its KVLayout has dims {layout.dims!r}, "
                    f"expected {', '.join(get_args(KVDim))} in any order, each once",
                    kind="attention_backend",
                )
        chosen.append(choose_layout(layouts, settings.kv_dtype, settings.block_size))
    return chosen


def make_pool(
    settings: RunnerSettings,
    backends: Backends,
    kv_specs: Sequence[KVSpec],
    layouts: Sequence[KVLayout],
    *,
    num_blocks: int,
    num_host_blocks: int = 0,
    poison: bool = False,
) -> KVPool:
    """A pool in these layouts. backends: copy between blocks where they can."""
    return KVPool(
        kv_specs,
        layouts,
        num_blocks=num_blocks,
        block_size=settings.block_size,
        dtype=settings.kv_dtype,
        device=settings.device,
        num_host_blocks=num_host_blocks,
        poison=poison,
        copiers={group: backend.copy_blocks for group, backend in backends},
    )


def kv_budget(
    settings: RunnerSettings,
    bytes_a_block: int,
    *,
    weights: int,
    activations: int,
    graphs: int,
    tables: int = 0,
) -> tuple[int, DeviceMemory | None]:
    """Bytes that the pool may take, and how they come about where the device's memory decides."""
    if settings.device.type == "cuda":
        utilization = settings.memory_utilization
        memory = kv_budget_cuda(
            settings.device, utilization, weights, activations, graphs, tables=tables
        )
        return memory.pool, memory
    blocks_each = -(-settings.max_model_len // settings.block_size)
    return kv_budget_cpu((settings.max_num_seqs * blocks_each + 1) * bytes_a_block), None


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
