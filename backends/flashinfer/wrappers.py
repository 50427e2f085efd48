"""FlashInfer's wrappers of the layers of one spec, and the memory that they share.

Batches of decodes that a graph runner captures have a wrapper for each size, with fixed buffers. Of
all these wrappers one is planned a step, and its plan writes everything anew, in stream order, so
they share their page table, and those of a spec share the int workspace, where plans lie. What a
plan decides for such a wrapper depends on the number of rows alone (whether contexts are split, the
grid, where partial results lie), since `fixed_split_size` is never given. The float workspace only
holds what a single call passes from its kernel to the one that combines: one serves all wrappers.

Legend: H query heads, K KV heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import flashinfer
import torch

from octavo.core.contracts.attention_backend import AttentionBackendContext
from octavo.core.contracts.model import AttentionSpec

LAYOUT = "NHD"
_GROUPS_WITHOUT_TENSOR_CORES = (1, 2)
"""H / K where the decode kernel on plain cores reads as fast; fp8 caches need tensor cores for
every group."""

_DECODE_KERNELS = "fa2"
"""The same kernels in captured graphs and elsewhere. `auto`, which is right for prompts (fa3 on
Hopper where it can), would take cuDNN for some eager decodes on Blackwell."""

_INT_BYTES, _INT_BYTES_ROW = 2**20, 128
"""The int workspace of captured decodes, and what each row adds. A plan needs 17 bytes a tile; the
tiles are as many as the device runs at once, or up to four a row. FlashInfer makes 8 MiB."""


class SharedMemory:
    """What all wrappers of a backend use. captured: indptr int32[most + 1], indices, last_page_len
    int32[most] of captured batches, which have `most` rows at most."""

    def __init__(self, workspace_bytes: int, context: AttentionBackendContext) -> None:
        self.context, device = context, context.device
        self.workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=device)
        self.most = max(context.graph_batch_sizes, default=0)
        blocks = self.most * -(-context.max_model_len // context.block_size)
        self.captured = [
            torch.zeros(size, dtype=torch.int32, device=device)
            for size in (self.most + 1, blocks, self.most)
        ]


@dataclass(slots=True)
class Wrappers:
    """decode and cascade: what this step's decode rows use. graphs: by number of rows."""

    shared: SharedMemory
    prefill: Any
    plain: Any
    cascaded: Any = None
    graphs: dict[int, Any] = field(default_factory=dict)
    decode: Any = None
    cascade: Any = None

    @classmethod
    def make(cls, spec: AttentionSpec, shared: SharedMemory) -> Wrappers:
        """Those of a spec. A cascade's are made when one is first planned."""
        device, sizes = shared.context.device, shared.context.graph_batch_sizes
        wrappers = cls(
            shared,
            prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared.workspace, LAYOUT),
            plain=_decode(spec, shared),
        )
        if not sizes:
            return wrappers
        plans = _INT_BYTES + _INT_BYTES_ROW * shared.most
        ints = torch.empty(plans, dtype=torch.uint8, device=device)
        indptr, indices, last = shared.captured
        for size in sizes:
            wrappers.graphs[size] = _decode(
                spec,
                shared,
                use_cuda_graph=True,
                paged_kv_indptr_buffer=indptr[: size + 1],
                paged_kv_indices_buffer=indices,
                paged_kv_last_page_len_buffer=last[:size],
            )
            wrappers.graphs[size].reset_workspace_buffer(shared.workspace, ints)
        return wrappers

    def use_cascade(self) -> Any:
        """The wrapper of two levels, for this step."""
        if self.cascaded is None:
            self.cascaded = flashinfer.MultiLevelCascadeAttentionWrapper(
                2, self.shared.workspace, LAYOUT
            )
        self.cascade = self.cascaded
        return self.cascade


def _decode(spec: AttentionSpec, shared: SharedMemory, **graph: Any) -> Any:
    group, small = spec.num_heads // spec.num_kv_heads, shared.context.kv_dtype.itemsize == 1
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        shared.workspace,
        LAYOUT,
        use_tensor_cores=small or group not in _GROUPS_WITHOUT_TENSOR_CORES,
        backend=_DECODE_KERNELS,
        **graph,
    )
