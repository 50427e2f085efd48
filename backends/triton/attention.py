"""Attention backend `triton`: paged decode with split-KV, paged prefill, rope fused.

`plan` fills fixed buffers; `run` allocates nothing and never waits for the device, so that batches
of decodes can be captured in a CUDA graph: their launches depend on the number of rows alone.
Legend: T tokens, B rows, H query heads, K KV heads, D head size, Dv value head size, n tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.triton.block_copy import BlockCopier
from octavo.backends.triton.decode import paged_decode
from octavo.backends.triton.kv_write import write_kv
from octavo.backends.triton.launch import num_processors
from octavo.backends.triton.options import TritonAttentionOptions
from octavo.backends.triton.prefill import paged_prefill, tile_queries
from octavo.backends.triton.support import BLOCK_SIZES, KV_DTYPES, unsupported
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform
from octavo.kernels import PinnedTwin

MOST_SPLITS = 32


def auto_splits(rows: int, kv_heads: int, processors: int) -> int:
    """Pieces of a row that give every multiprocessor two programs, a power of two: a function of
    the batch's size alone, so that it is the same when a graph is captured and replayed."""
    programs = max(1, rows * kv_heads)
    splits = 1
    while splits < MOST_SPLITS and splits * programs < 2 * processors:
        splits *= 2
    return splits


def prefill_tiles(
    query_start: NDArray[np.int32], first_row: int, queries: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """(row, first query) int32[n] of the tiles that cover rows from `first_row` on, row by row."""
    counts = np.diff(query_start[first_row:])
    tiles = -(-counts // queries)
    total = int(tiles.sum())
    before = np.cumsum(tiles) - tiles
    rows = np.repeat(np.arange(first_row, first_row + counts.size, dtype=np.int32), tiles)
    number = np.arange(total, dtype=np.int32) - np.repeat(before, tiles).astype(np.int32)
    return rows, number * np.int32(queries)


@dataclass(slots=True)
class _Tiles:
    """Tiles of layers with this many queries a tile. planned: (row, first query) int32[n] of this
    step's, on the device; None when it has none."""

    queries: int
    rows: PinnedTwin
    first: PinnedTwin
    planned: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def make(cls, queries: int, context: AttentionBackendContext) -> _Tiles:
        most = context.max_num_batched_tokens // queries + context.max_num_seqs + 1
        rows, first = (PinnedTwin(most, torch.int32, context.device) for _ in range(2))
        return cls(queries, rows, first)

    def fill(self, batch: AttentionBatch) -> None:
        rows, first = prefill_tiles(batch.query_start_loc_cpu, batch.num_decodes, self.queries)
        self.planned = (self.rows.fill(rows), self.first.fill(first)) if rows.size else None


class TritonAttention(AttentionBackend):
    """See the module."""

    fuses_rope = True
    graph_support = "decode"

    def __init__(self, options: TritonAttentionOptions, context: AttentionBackendContext) -> None:
        self._num_splits, self._dtype = options.num_splits, context.dtype
        self._processors = num_processors(context.device)
        self._tiles: dict[int, _Tiles] = {}
        for spec in context.specs:
            queries = tile_queries(spec, context.dtype)
            if queries not in self._tiles:
                self._tiles[queries] = _Tiles.make(queries, context)
        rows = [self._partial_rows(spec, context.max_num_seqs) for spec in context.specs]
        sizes = [n * s.value_head_size for n, s in zip(rows, context.specs, strict=True)]
        self._partial = torch.empty(
            max(sizes, default=0), dtype=torch.float32, device=context.device
        )
        self._lse = torch.empty(max(rows, default=0), dtype=torch.float32, device=context.device)
        self._batch: AttentionBatch | None = None
        self._copier = BlockCopier(context.device)

    def _splits(self, rows: int, spec: AttentionSpec) -> int:
        if self._num_splits != "auto":
            return self._num_splits
        return auto_splits(rows, spec.num_kv_heads, self._processors)

    def _partial_rows(self, spec: AttentionSpec, max_rows: int) -> int:
        """Most partial results [Dv] of a batch of decodes. There are not most of them in the
        largest batch, which is cut into fewer pieces."""
        sizes = ((rows, self._splits(rows, spec)) for rows in range(1, max_rows + 1))
        return max((n * s * spec.num_heads for n, s in sizes if s > 1), default=0)

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        return unsupported(spec, platform)

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        return [
            KVLayout(("kv", "block", "token", "head", "dim"), KV_DTYPES, BLOCK_SIZES),
            KVLayout(("kv", "block", "head", "token", "dim"), KV_DTYPES, BLOCK_SIZES),
        ]

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        for tiles in self._tiles.values():
            tiles.fill(batch)

    def copy_blocks(
        self,
        pools: list[torch.Tensor],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> bool:
        self._copier.copy(pools, sources, targets, tokens)
        return True

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        batch, spec = self._batch, layer.spec
        assert batch is not None, "attention ran before it was planned"
        cos_sin = layer.cos_sin if spec.rope_dim else None
        q, k, v = _dense(q), _dense(k), _dense(v)
        write_kv(
            k,
            v,
            layer.k_cache,
            layer.v_cache,
            batch.slot_mapping,
            positions=batch.positions,
            cos_sin=cos_sin,
            interleaved=spec.rope_interleaved,
        )
        decodes = batch.num_decodes
        if decodes:
            paged_decode(
                q[:decodes],
                layer.k_cache,
                layer.v_cache,
                batch.block_table,
                batch.seq_lens,
                out[:decodes],
                spec,
                splits=self._splits(decodes, spec),
                partial=self._partial,
                lse=self._lse,
                positions=batch.positions,
                cos_sin=cos_sin,
            )
        tiles = self._tiles[tile_queries(spec, q.dtype)]
        if tiles.planned is not None:
            paged_prefill(
                q,
                layer.k_cache,
                layer.v_cache,
                batch.block_table,
                batch.seq_lens,
                batch.query_start_loc,
                tiles.planned,
                out,
                spec,
                positions=batch.positions,
                cos_sin=cos_sin,
            )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x[T, h, D] with the values of a head side by side; tokens and heads may be apart."""
    return x if x.stride(2) == 1 else x.contiguous()
