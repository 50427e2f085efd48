"""Attention backend `flex`: PyTorch's FlexAttention over the paged pool.

Rows with the same number of queries (rounded up to a power of two) are one batch of FlexAttention,
whose keys and values are the pool itself, shared by all rows of the batch. The block mask lists
each row's own blocks (its block table), and says of a place in the pool which token of the row it
holds.

On a CPU the blocks that a batch uses are gathered first, and what was never written in them is
zeroed; and the unfused form computes one row at a time, because it multiplies all it is given, by
weight zero where masked. PyTorch's code for CPUs is compiled for fixed shapes, so rows and blocks
are filled up to powers of two.

Legend: T tokens, B rows, b rows of a batch, Q their queries, H query heads, K KV heads, D head
size, N blocks, n blocks that are attended, P tokens a block, M blocks a row at most.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from octavo.backends.attention.cache_dtype import to_cache_dtype
from octavo.backends.attention.features import missing_feature, uneven_heads
from octavo.backends.attention.flex_options import FlexOptions
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform
from octavo.core.errors import PluginUnavailable
from octavo.kernels import upload

_CUDA_BLOCKS = (16, 32, 64, 128)

_SHAPES = 256
"""Most shapes that are compiled for; there are a few for each power of two."""


@dataclass(slots=True)
class _Rows:
    """Rows of one FlexAttention call. queries: Q. places: int64[b * Q], the token of each query in
    the flat batch (that of the row's last query where there are fewer). used: int64, which of the
    b * Q are queries; None when all are. masks: the block mask by window. blocks: int64[n], the
    blocks that are gathered; None when the pool is read in place. written: bool[n * P, 1, 1]."""

    queries: int
    places: torch.Tensor
    used: torch.Tensor | None
    masks: dict[int | None, BlockMask]
    blocks: torch.Tensor | None
    written: torch.Tensor | None


class FlexAttention(AttentionBackend):
    """See the module."""

    def __init__(self, options: FlexOptions, context: AttentionBackendContext) -> None:
        self._block_size, self._device = context.block_size, context.device
        self._kv_dtype = context.kv_dtype
        self._windows = {spec.window for spec in context.specs}
        self._in_place = context.device.type == "cuda"
        if self._in_place and context.block_size not in _CUDA_BLOCKS:
            raise PluginUnavailable(
                f"the flex backend supports blocks of {', '.join(map(str, _CUDA_BLOCKS))} tokens "
                f"on cuda, not {context.block_size}"
            )
        wanted = self._in_place if options.compile == "auto" else options.compile
        self._attend: Callable[..., Any] = _unfused
        self._filled = bool(wanted) and not self._in_place
        if wanted:
            limit = torch._dynamo.config.recompile_limit
            torch._dynamo.config.recompile_limit = max(limit, _SHAPES)
            self._attend = torch.compile(flex_attention, dynamic=self._in_place)
        # Tiles of the generated kernel must divide the blocks of the mask.
        tile = {"BLOCK_M": 16, "BLOCK_N": min(64, context.block_size)}
        self._kernel_options: dict[str, Any] | None = None
        if self._in_place:
            self._kernel_options = {**tile, "FORCE_USE_FLEX_ATTENTION": True}
        self._batch: AttentionBatch | None = None
        self._planned: list[_Rows] | None = None

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        reason = missing_feature(spec, "flex") or uneven_heads(spec)
        if reason is not None:
            return reason
        if platform.device == "cuda" and min(spec.head_size, spec.value_head_size) < 16:
            return "the flex backend needs a head size of at least 16 on cuda"
        return None

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        return [KVLayout(("kv", "block", "token", "head", "dim"))]

    # ---- once a batch ---------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        self._batch, self._planned = batch, None

    def _plan(self, batch: AttentionBatch, num_blocks: int) -> list[_Rows]:
        counts = np.diff(batch.query_start_loc_cpu)
        if self._attend is _unfused:
            # Alone, so that what is masked with weight zero is at least the row's own.
            return [
                self._rows(batch, np.array([row]), int(count), num_blocks)
                for row, count in enumerate(counts)
            ]
        sizes = 1 << np.ceil(np.log2(np.maximum(counts, 1))).astype(np.int64)
        return [
            self._rows(batch, np.flatnonzero(sizes == size), int(size), num_blocks)
            for size in np.unique(sizes)
        ]

    def _rows(
        self, batch: AttentionBatch, rows: NDArray[np.intp], queries: int, num_blocks: int
    ) -> _Rows:
        size, num_rows = self._block_size, len(rows)
        if self._filled:
            rows = np.pad(rows, (0, _power_of_2(num_rows) - num_rows), mode="edge")
        counts = np.diff(batch.query_start_loc_cpu)[rows]
        lengths = batch.seq_lens_cpu[rows]
        pages = -(-lengths // size)
        tables = batch.block_table_cpu[rows][:, : int(pages.max())].astype(np.int64)
        number = np.arange(queries)
        index = np.minimum(number, counts[:, None] - 1)
        places = batch.query_start_loc_cpu[rows][:, None] + index
        used = (number < counts[:, None]) & (np.arange(len(rows)) < num_rows)[:, None]
        exists = np.arange(tables.shape[1]) < pages[:, None]
        blocks = written = None
        if not self._in_place:
            blocks, inverse = np.unique(tables[exists], return_inverse=True)
            tables = np.zeros_like(tables)
            tables[exists] = inverse
            if self._filled:
                blocks = np.pad(blocks, (0, _power_of_2(len(blocks)) - len(blocks)))
            num_blocks = len(blocks)
            written = np.zeros(num_blocks * size, bool)
            written[_tokens_of(tables, lengths, size)] = True
        masks = self._masks(tables, exists, lengths - counts, queries, num_blocks=num_blocks)
        return _Rows(
            queries,
            self._on(places.ravel()),
            None if used.all() else self._on(used.ravel().nonzero()[0]),
            masks,
            None if blocks is None else self._on(blocks),
            None if written is None else self._on(written)[:, None, None],
        )

    def _masks(
        self,
        tables: NDArray[np.int64],
        exists: NDArray[np.bool_],
        context: NDArray[np.int64],
        queries: int,
        *,
        num_blocks: int,
    ) -> dict[int | None, BlockMask]:
        """By window. tables [b, M] into the blocks that are attended, where they exist; context
        [b], tokens before the first query. Blocks before a window are masked, not skipped."""
        rows, size = len(tables), self._block_size
        logical = np.full((rows, num_blocks), -1, np.int32)
        row, column = exists.nonzero()
        logical[row, tables[row, column]] = column
        order = np.zeros((rows, 1, 1, num_blocks), np.int32)
        order[:, 0, 0, : tables.shape[1]] = tables
        number = exists.sum(axis=1, dtype=np.int32).reshape(rows, 1, 1)
        where, first = self._on(logical), self._on(context.astype(np.int32))
        kv_num, kv_indices = self._on(number), self._on(order)

        def mask(window: int | None) -> BlockMask:
            # Numbers as defaults are constants to torch.compile, those of a closure are inputs.
            def seen(
                b: torch.Tensor,
                h: torch.Tensor,
                q: torch.Tensor,
                kv: torch.Tensor,
                *,
                size: int = size,
                window: int | None = window,
            ) -> torch.Tensor:
                block = where[b, kv // size]
                position, query = block * size + kv % size, first[b] + q
                allowed = (block >= 0) & (position <= query)
                if window is not None:
                    allowed = allowed & (position > query - window)
                return allowed

            return BlockMask.from_kv_blocks(
                kv_num,
                kv_indices,
                BLOCK_SIZE=(max(queries, 16), size),
                mask_mod=seen,
                seq_lengths=(queries, num_blocks * size),
                compute_q_blocks=False,
            )

        return {window: mask(window) for window in self._windows}

    def _on(self, array: NDArray[Any]) -> torch.Tensor:
        return upload(array, self._device)

    # ---- once a layer ---------------------------------------------------------------------------

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
        keys, values = _flat(layer.k_cache), _flat(layer.v_cache)
        keys.index_copy_(0, batch.slot_mapping, to_cache_dtype(k, self._kv_dtype))
        values.index_copy_(0, batch.slot_mapping, to_cache_dtype(v, self._kv_dtype))
        if self._planned is None:
            self._planned = self._plan(batch, layer.k_cache.shape[0])
        score = None if spec.soft_cap is None else _capped(spec.soft_cap)
        for rows in self._planned:
            mine = [self._gathered(cache, rows, q.dtype) for cache in (keys, values)]
            queries = q.index_select(0, rows.places).view(-1, rows.queries, *q.shape[1:])
            attended = self._attend(
                queries.transpose(1, 2),
                mine[0].transpose(0, 1).unsqueeze(0),
                mine[1].transpose(0, 1).unsqueeze(0),
                score_mod=score,
                block_mask=rows.masks[spec.window],
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
                kernel_options=self._kernel_options,
            )
            attended = attended.transpose(1, 2).reshape(-1, *out.shape[1:])
            if rows.used is None:
                out.index_copy_(0, rows.places, attended)
            else:
                places = rows.places.index_select(0, rows.used)
                out.index_copy_(0, places, attended.index_select(0, rows.used))

    def _gathered(self, cache: torch.Tensor, rows: _Rows, dtype: torch.dtype) -> torch.Tensor:
        """[n * P, K, D]"""
        if rows.blocks is None:
            return cache.to(dtype)
        pages = cache.view(-1, self._block_size, *cache.shape[1:])
        found = pages.index_select(0, rows.blocks).flatten(0, 1)
        assert rows.written is not None, "what is gathered is known to be written"
        return torch.where(rows.written, found, 0).to(dtype)


def _tokens_of(
    tables: NDArray[np.int64], lengths: NDArray[np.int32], block_size: int
) -> NDArray[np.int64]:
    """Places int64 in the gathered pool of every token of every row."""
    index = np.arange(tables.shape[1] * block_size)
    places = tables[:, index // block_size] * block_size + index % block_size
    kept: NDArray[np.int64] = places[index < lengths[:, None]]
    return kept


def _power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _flat(cache: torch.Tensor) -> torch.Tensor:
    """[N, P, K, D] as [N * P, K, D]."""
    return cache.view(-1, *cache.shape[2:])


def _capped(cap: float) -> Callable[..., torch.Tensor]:
    def score(
        logits: torch.Tensor,
        b: torch.Tensor,
        h: torch.Tensor,
        q: torch.Tensor,
        kv: torch.Tensor,
        *,
        cap: float = cap,
    ) -> torch.Tensor:
        return cap * torch.tanh(logits / cap)

    return score


def _unfused(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # PyTorch's advice to compile, which was decided against
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(*args, **kwargs)
