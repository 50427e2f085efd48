"""Two attention backends in one: `attention: {prefill: ..., decode: ...}`.

Decode rows come first in a batch, so each backend gets a batch that is a view of the whole one.
Both write the KV of their own rows; the pool lies in a layout that both read.
Legend: T tokens, B rows, b decode rows.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

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
from octavo.kernels import RopeTable, apply_rope


class PhasedAttention(AttentionBackend):
    """`decode` computes rows of one token that stand first, `prefill` the others."""

    def __init__(
        self,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        context: AttentionBackendContext,
    ) -> None:
        self.prefill, self.decode = prefill, decode
        self.fuses_rope = prefill.fuses_rope or decode.fuses_rope
        self.graph_support: Literal["none", "decode", "all"] = (
            decode.graph_support if decode.graph_support == prefill.graph_support else "decode"
        )
        if decode.graph_support == "none":
            self.graph_support = "none"
        self._device = context.device
        self._num_decodes = self._num_tokens = 0
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._starts = torch.zeros(
            context.max_num_seqs + 1, dtype=torch.int32, device=context.device
        )
        self._tables: dict[tuple[int, bool], RopeTable] = {}
        for spec in context.specs:
            shared_layouts(prefill, decode, spec)  # refuse at start

    def supports(  # type: ignore[override]
        self, spec: AttentionSpec, platform: Platform
    ) -> str | None:
        for phase, backend in (("prefill", self.prefill), ("decode", self.decode)):
            reason = backend.supports(spec, platform)
            if reason:
                return f"{phase}: {reason}"
        return None

    def kv_layouts(self, spec: AttentionSpec) -> list[KVLayout]:  # type: ignore[override]
        return shared_layouts(self.prefill, self.decode, spec)

    # ---- once a batch ---------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        rows, decodes = batch.num_rows, batch.num_decodes
        self._num_decodes, self._num_tokens = decodes, batch.num_tokens
        self._positions = batch.positions
        if decodes == rows:
            self.decode.plan(batch)
            return
        if not decodes:
            self.prefill.plan(batch)
            return
        self.decode.plan(_decode_part(batch))
        starts = self._starts[: rows - decodes + 1]
        torch.sub(batch.query_start_loc[decodes : rows + 1], decodes, out=starts)
        self.prefill.plan(_prefill_part(batch, starts))

    # ---- once a layer ---------------------------------------------------------------------------

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        border, end = self._num_decodes, self._num_tokens
        parts = ((self.decode, slice(0, border)), (self.prefill, slice(border, end)))
        for backend, part in parts:
            if part.start < part.stop:
                mine_q, mine_k = q[part], k[part]
                if self.fuses_rope and not backend.fuses_rope:
                    mine_q, mine_k = self._rotated(layer, mine_q, mine_k, part)
                backend.run(layer, mine_q, mine_k, v[part], out[part])

    def _rotated(
        self, layer: AttentionLayer, q: torch.Tensor, k: torch.Tensor, part: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As the core does for a backend that does not fuse rope."""
        spec = layer.spec
        if not spec.rope_dim or layer.cos_sin is None:
            return q, k
        key = (layer.cos_sin.data_ptr(), spec.rope_interleaved)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = RopeTable(layer.cos_sin, spec.rope_interleaved)
        cos, sin = table.rows(self._positions[part])
        return (
            apply_rope(q, cos, sin, interleaved=spec.rope_interleaved),
            apply_rope(k, cos, sin, interleaved=spec.rope_interleaved),
        )

    def copy_blocks(
        self,
        pools: list[torch.Tensor],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> bool:
        return self.decode.copy_blocks(pools, sources, targets, tokens) or self.prefill.copy_blocks(
            pools, sources, targets, tokens
        )


def shared_layouts(
    prefill: AttentionBackend, decode: AttentionBackend, spec: AttentionSpec
) -> list[KVLayout]:
    """Layouts that both read and write, in the decode backend's order, which reads KV most. Raises
    `PluginUnavailable` when there is none."""
    theirs = prefill.kv_layouts(spec)
    shared = []
    for mine in decode.kv_layouts(spec):
        for other in theirs:
            dtypes = tuple(name for name in mine.dtypes if name in other.dtypes)
            sizes = _common(mine.block_sizes, other.block_sizes)
            same = (mine.dims, mine.extra) == (other.dims, other.extra)
            if same and dtypes and sizes is not None:
                shared.append(KVLayout(mine.dims, dtypes, sizes, mine.extra))
    if not shared:
        both = [
            f"{name} has {'; '.join('/'.join(layout.dims) for layout in layouts)}"
            for name, layouts in (("prefill", theirs), ("decode", decode.kv_layouts(spec)))
        ]
        raise PluginUnavailable(
            "the attention backends for prefill and decode share no KV cache layout: "
            + ", ".join(both),
            kind="attention_backend",
        )
    return shared


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...] | None:
    """Block sizes in both; empty means any. None when there is none."""
    if not first or not second:
        return first or second
    return tuple(size for size in first if size in second) or None


def _decode_part(batch: AttentionBatch) -> AttentionBatch:
    rows = batch.num_decodes
    return dataclasses.replace(
        batch,
        num_tokens=rows,
        num_rows=rows,
        max_query_len=1,
        max_seq_len=int(batch.seq_lens_cpu[:rows].max()),
        query_start_loc=batch.query_start_loc[: rows + 1],
        seq_lens=batch.seq_lens[:rows],
        block_table=batch.block_table[:rows],
        slot_mapping=batch.slot_mapping[:rows],
        positions=batch.positions[:rows],
        query_start_loc_cpu=batch.query_start_loc_cpu[: rows + 1],
        seq_lens_cpu=batch.seq_lens_cpu[:rows],
        block_table_cpu=batch.block_table_cpu[:rows],
    )


def _prefill_part(batch: AttentionBatch, starts: torch.Tensor) -> AttentionBatch:
    """starts: int32[B - b + 1], from 0."""
    first, rows = batch.num_decodes, slice(batch.num_decodes, batch.num_rows)
    return dataclasses.replace(
        batch,
        num_tokens=batch.num_tokens - first,
        num_rows=batch.num_rows - first,
        num_decodes=0,
        max_seq_len=int(batch.seq_lens_cpu[rows].max()),
        query_start_loc=starts,
        seq_lens=batch.seq_lens[rows],
        block_table=batch.block_table[rows],
        slot_mapping=batch.slot_mapping[first : batch.num_tokens],
        positions=batch.positions[first : batch.num_tokens],
        query_start_loc_cpu=batch.query_start_loc_cpu[first : batch.num_rows + 1] - first,
        seq_lens_cpu=batch.seq_lens_cpu[rows],
        block_table_cpu=batch.block_table_cpu[rows],
    )
