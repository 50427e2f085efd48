"""Attention backend `flashinfer`: FlashInfer's paged wrappers, planned once a step.

Decode rows go to the decode wrapper, others to the prefill wrapper; decode rows that share a long
prefix go to the cascade wrapper, which reads the prefix once for all of them. `plan` gives pinned
host copies of the page table where FlashInfer would fetch them from the device, or copy them to it
from pageable memory.

Legend: T tokens, B rows, b decode rows, H query heads, K KV heads, D head size, N blocks, P tokens
a block, n pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.attention.cache_dtype import to_cache_dtype
from octavo.backends.flashinfer.options import FlashInferOptions
from octavo.backends.flashinfer.page_table import (
    PageTable,
    SharedPrefix,
    appended,
    page_table,
    shared_prefix,
)
from octavo.backends.flashinfer.support import KV_DTYPES, load, unsupported
from octavo.backends.flashinfer.wrappers import LAYOUT, SharedMemory, Wrappers
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform
from octavo.kernels import PinnedTwin, pin


@dataclass(slots=True)
class _Step:
    """tokens, decodes: T, b. batch_indices .. last_page_len: of all rows, on the device, for the KV
    write. shared: rows that share a prefix; on the device, theirs and the other decode rows."""

    tokens: int
    decodes: int
    batch_indices: torch.Tensor
    positions: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    shared: SharedPrefix | None = None
    shared_rows: torch.Tensor | None = None
    other_rows: torch.Tensor | None = None


class FlashInferAttention(AttentionBackend):
    """See the module."""

    fuses_rope = False
    graph_support = "decode"

    def __init__(self, options: FlashInferOptions, context: AttentionBackendContext) -> None:
        load(flashinfer.page.get_page_module)
        self._options, self._context = options, context
        device = context.device
        blocks_each = -(-context.max_model_len // context.block_size)
        rows, tokens = context.max_num_seqs, context.max_num_batched_tokens
        self._indptr = PinnedTwin(rows + 1, torch.int32, device)
        self._indices = PinnedTwin(rows * blocks_each, torch.int32, device)
        self._last = PinnedTwin(rows, torch.int32, device)
        self._batch_indices = PinnedTwin(tokens, torch.int32, device)
        self._positions = PinnedTwin(tokens, torch.int32, device)
        self._rows = PinnedTwin(rows, torch.int32, device)
        self._prefix = PinnedTwin(blocks_each, torch.int32, device)
        self._suffixes = PinnedTwin(rows * blocks_each, torch.int32, device)
        self._rest = PinnedTwin(rows * blocks_each, torch.int32, device)
        shared = SharedMemory(options.workspace_bytes, context)
        self._wrappers = {spec: Wrappers.make(spec, shared) for spec in context.specs}
        self._step: _Step | None = None

    def _host(self, values: NDArray[Any]) -> torch.Tensor:
        return pin(values.astype(np.int32, copy=False), self._context.device)

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        return unsupported(spec, platform)

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        return [KVLayout(("kv", "block", "token", "head", "dim"), KV_DTYPES)]

    # ---- once a batch ---------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        size, decodes = self._context.block_size, batch.num_decodes
        table = page_table(batch.seq_lens_cpu, batch.block_table_cpu, size)
        rows, positions = appended(batch.query_start_loc_cpu, batch.seq_lens_cpu)
        step = self._step = _Step(
            tokens=batch.num_tokens,
            decodes=decodes,
            batch_indices=self._batch_indices.fill(rows),
            positions=self._positions.fill(positions),
            indptr=self._indptr.fill(table.indptr),
            indices=self._indices.fill(table.indices),
            last_page_len=self._last.fill(table.last_page_len),
        )
        captured = decodes == batch.num_rows and decodes in self._context.graph_batch_sizes
        if decodes:
            if not captured:
                step.shared = self._shared(batch)
            self._plan_decodes(batch, table.rows(0, decodes), step, captured)
        if decodes < batch.num_rows:
            self._plan_prefills(batch, table, step)

    def _shared(self, batch: AttentionBatch) -> SharedPrefix | None:
        options, size = self._options, self._context.block_size
        if not options.cascade or any(spec.window for spec in self._wrappers):
            return None
        rows = slice(0, batch.num_decodes)
        return shared_prefix(
            batch.seq_lens_cpu[rows],
            batch.block_table_cpu[rows],
            size,
            min_rows=options.cascade_min_rows,
            min_pages=-(-options.cascade_min_tokens // size),
        )

    def _plan_decodes(
        self, batch: AttentionBatch, table: PageTable, step: _Step, captured: bool
    ) -> None:
        rows = batch.num_decodes
        if step.shared is not None:
            self._plan_cascade(batch, step.shared, step)
            return
        indices = step.indices[: len(table.indices)]
        ends = self._host(table.indptr), self._host(table.last_page_len)
        for spec, wrappers in self._wrappers.items():
            wrappers.cascade = None
            wrappers.decode = wrappers.graphs[rows] if captured else wrappers.plain
            self._plan_decode(wrappers.decode, spec, ends, indices)

    def _plan_decode(
        self,
        wrapper: Any,
        spec: AttentionSpec,
        ends: tuple[torch.Tensor, torch.Tensor],
        indices: torch.Tensor,
    ) -> None:
        """ends: indptr and last_page_len, on the host."""
        indptr, last_page_len = ends
        wrapper.plan(
            indptr,
            indices,
            last_page_len,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            self._context.block_size,
            pos_encoding_mode="NONE",
            window_left=_window_left(spec),
            logits_soft_cap=spec.soft_cap,
            q_data_type=self._context.dtype,
            kv_data_type=self._context.kv_dtype,
            o_data_type=self._context.dtype,
            sm_scale=spec.scale,
            non_blocking=True,
        )

    def _plan_cascade(self, batch: AttentionBatch, shared: SharedPrefix, step: _Step) -> None:
        size, rows, others = self._context.block_size, shared.rows, shared.others
        skipped = np.full(len(rows), len(shared.pages), np.int32)
        lengths, tables = batch.seq_lens_cpu[rows], batch.block_table_cpu[rows]
        suffix = page_table(lengths, tables, size, skipped)
        order = self._rows.fill(np.concatenate((rows, others)))
        step.shared_rows, step.other_rows = order[: len(rows)], order[len(rows) :]
        rest = page_table(batch.seq_lens_cpu[others], batch.block_table_cpu[others], size)
        prefix, suffixes = self._prefix.fill(shared.pages), self._suffixes.fill(suffix.indices)
        rest_indices = self._rest.fill(rest.indices)
        queries = [self._host(np.array([0, len(rows)])), self._host(np.arange(len(rows) + 1))]
        indptrs = [self._host(np.array([0, len(shared.pages)])), self._host(suffix.indptr)]
        lasts = [self._host(np.array([size])), self._host(suffix.last_page_len)]
        ends = self._host(rest.indptr), self._host(rest.last_page_len)
        for spec, wrappers in self._wrappers.items():
            wrappers.use_cascade().plan(
                queries,
                indptrs,
                [prefix, suffixes],
                lasts,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                size,
                causal=True,
                pos_encoding_mode="NONE",
                sm_scale=spec.scale,
                window_left=-1,
                logits_soft_cap=spec.soft_cap,
                q_data_type=self._context.dtype,
                kv_data_type=self._context.kv_dtype,
            )
            wrappers.decode = wrappers.plain if len(others) else None
            if len(others):
                self._plan_decode(wrappers.decode, spec, ends, rest_indices)

    def _plan_prefills(self, batch: AttentionBatch, table: PageTable, step: _Step) -> None:
        first = batch.num_decodes
        mine = table.rows(first, batch.num_rows)
        starts = batch.query_start_loc_cpu[first:] - batch.query_start_loc_cpu[first]
        indices = step.indices[int(table.indptr[first]) :]
        queries, indptr, last, lengths = (
            self._host(values)
            for values in (starts, mine.indptr, mine.last_page_len, batch.seq_lens_cpu[first:])
        )
        for spec, wrappers in self._wrappers.items():
            wrappers.prefill.plan(
                queries,
                indptr,
                indices,
                last,
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_size,
                self._context.block_size,
                causal=True,
                pos_encoding_mode="NONE",
                sm_scale=spec.scale,
                window_left=_window_left(spec),
                logits_soft_cap=spec.soft_cap,
                q_data_type=self._context.dtype,
                kv_data_type=self._context.kv_dtype,
                o_data_type=self._context.dtype,
                seq_lens=lengths,  # else it computes them, in memory that is not pinned
                non_blocking=True,
            )

    # ---- once a layer ---------------------------------------------------------------------------

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        step = self._step
        assert step is not None, "attention ran before it was planned"
        wrappers, cache = self._wrappers[layer.spec], (layer.k_cache, layer.v_cache)
        k, v = (to_cache_dtype(x, self._context.kv_dtype) for x in (k, v))
        flashinfer.append_paged_kv_cache(
            k,
            v,
            step.batch_indices,
            step.positions,
            cache,
            step.indices,
            step.indptr,
            step.last_page_len,
            LAYOUT,
        )
        border, end = step.decodes, step.tokens
        q = q.contiguous()
        if border:
            if wrappers.cascade is not None:
                self._run_cascade(wrappers, step, q[:border], cache, out[:border])
            else:
                wrappers.decode.run(q[:border], cache, out=out[:border])
        if border < end:
            wrappers.prefill.run(q[border:end], cache, out=out[border:end])

    @staticmethod
    def _run_cascade(
        wrappers: Wrappers,
        step: _Step,
        q: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
    ) -> None:
        """Rows with the shared prefix together, the other decode rows as usual."""
        shared, others = step.shared_rows, step.other_rows
        assert shared is not None, "a cascade was planned"
        if wrappers.decode is None:
            out.copy_(wrappers.cascade.run(q, cache))
            return
        assert others is not None, "a cascade was planned"
        out.index_copy_(0, shared.long(), wrappers.cascade.run(q.index_select(0, shared), cache))
        out.index_copy_(0, others.long(), wrappers.decode.run(q.index_select(0, others), cache))


def _window_left(spec: AttentionSpec) -> int:
    """Tokens before its own that a query sees; -1: all."""
    return -1 if spec.window is None else spec.window - 1
