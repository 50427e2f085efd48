"""Kind `attention_backend`: KV layout, metadata of a batch, and the attention kernels.

Runs in the worker. Legend: T tokens (flat), B rows, H query heads, K KV heads, D head size, N
blocks, P tokens a block, M blocks a row at most. Decode rows (one token each) come first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform, Provider, hookspec

if TYPE_CHECKING:
    import torch

KVDim = Literal["kv", "block", "token", "head", "dim"]
"""A dimension of a layer's KV pool: kv (keys, then values), block, token (of the block), head (of
the KV heads), dim (of the head)."""


@dataclass(frozen=True)
class KVLayout:
    """How one layer's KV pool lies in memory. Whatever the order, the core hands it out as two
    views k and v of the logical shape [N, P, K, D + extra]."""

    dims: tuple[KVDim, ...]  # outermost to innermost, each of the five once
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")  # that it reads and writes
    block_sizes: tuple[int, ...] = ()  # allowed tokens per block; empty: any
    # Elements after the values of each head, such as a scale; copies of blocks include them.
    extra: int = 0


@dataclass(slots=True)
class AttentionBatch:
    """One group's view of a step. Tensors live on the device, at fixed addresses; `_cpu` twins are
    NumPy arrays with the same values."""

    num_tokens: int  # T
    num_rows: int  # B
    num_decodes: int  # rows [0, num_decodes) have one token each
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # int32[B + 1], where each row's tokens begin in the flat batch
    seq_lens: torch.Tensor  # int32[B], tokens in the KV cache including this step's
    block_table: torch.Tensor  # int32[B, M]
    slot_mapping: torch.Tensor  # int64[T], block * P + offset, where each token's KV is written
    positions: torch.Tensor  # int64[T]
    query_start_loc_cpu: NDArray[np.int32]
    seq_lens_cpu: NDArray[np.int32]
    block_table_cpu: NDArray[np.int32]


@dataclass(frozen=True)
class AttentionLayer:
    """One layer as a backend sees it."""

    layer: int
    spec: AttentionSpec
    k_cache: torch.Tensor  # view [N, P, K, D + extra] of the pool
    v_cache: torch.Tensor
    cos_sin: torch.Tensor | None = None  # float32[max_model_len, rope_dim], cosines then sines


@dataclass(frozen=True)
class AttentionBackendContext:
    """What a factory gets. The maxima are upper bounds for buffers."""

    specs: tuple[AttentionSpec, ...]  # the distinct ones of one KV group
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    # Numbers of rows for which decode batches run from a captured graph: `plan` of such a batch
    # must lead to the same launches on the same addresses each time.
    graph_batch_sizes: tuple[int, ...] = ()


class AttentionBackend(ABC):
    """`plan` once per batch, `run` once per layer."""

    fuses_rope: bool = False  # `run` gets q and k unrotated and rotates them; else the core does
    graph_support: Literal["none", "decode", "all"] = "none"  # batches that can be captured

    @staticmethod
    @abstractmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        """None when this backend can compute the layer there, else the reason why not."""

    @staticmethod
    @abstractmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        """Layouts that it reads and writes, best first."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare the layers of this batch, into buffers allocated by `__init__`. Copies of the
        last call from the host are done, so its pinned memory may be written; that batch's layers
        may still be running, so what they read changes in stream order only. Must not wait for the
        device."""

    @abstractmethod
    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Write k[T, K, D] and v[T, K, Dv] into the pool by slot mapping, then attend:
        q[T, H, D] over each row's cached tokens, causally, into out[T, H, Dv]."""

    def copy_blocks(
        self,
        pools: list[torch.Tensor],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> bool:
        """Copy KV between blocks of all layers at once: in every pool [N, P, K, D], the first
        `tokens` int32[n] tokens of the blocks `sources` int32[n] to the blocks `targets` int32[n].
        Copies of one call do not depend on each other. False: nothing was done, the core copies."""
        return False


class Spec:
    @hookspec
    def octavo_attention_backends(self) -> list[Provider[AttentionBackend]]:  # type: ignore[empty-body]
        """Providers of attention backends. A probe reads the facts `attention_specs`, `dtype`,
        `kv_dtype` and `block_size`.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `AttentionBackendContext`.
        """


KIND = Kind(
    "attention_backend", Spec, AttentionBackend, AttentionBackendContext, "attention.backend", "1.1"
)
