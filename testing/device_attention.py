"""A batch with known right answers on any device, for tests of attention backends on a GPU too.

    case = DeviceCase(MyAttention, attention_spec(heads=4, kv_heads=2), [(30, 1), (0, 7)])
    case.check()

Unlike `attention_case`, the context is put into the pool as it shall be, not computed by the
backend that is tested, and its rows can be changed. Unwritten memory is NaN, so that whoever reads
too far is seen. The answers come from a loop over queries in float64, on the host.
Legend: T tokens, H query heads, K KV heads, D head size, Dv value head size, S tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec, KVSpec
from octavo.engine.worker.kv_layout import choose_layout
from octavo.engine.worker.kv_pool import KVPool, byte_view
from octavo.kernels import RopeTable, apply_rope

MakeBackend = Callable[[AttentionBackendContext], AttentionBackend]


def attention_spec(
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 8,
    *,
    value_size: int | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    rope_dim: int = 0,
    rope_interleaved: bool = False,
) -> AttentionSpec:
    """A spec with a scale that is not the usual one."""
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        value_head_size=value_size or size,
        scale=0.7 / math.sqrt(size),
        window=window,
        soft_cap=soft_cap,
        rope_dim=rope_dim,
        rope_interleaved=rope_interleaved,
    )


def expected_rows(
    spec: AttentionSpec, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int
) -> torch.Tensor:
    """float64[n, H, Dv]: queries [n, H, D] at positions from `context` on, over keys [S, K, D] and
    values [S, K, Dv], one query at a time."""
    group = spec.num_heads // spec.num_kv_heads
    keys = keys.double().repeat_interleave(group, 1)
    values = values.double().repeat_interleave(group, 1)
    rows = []
    for number in range(len(q)):
        position = context + number
        low = 0 if spec.window is None else max(0, position - spec.window + 1)
        seen = slice(low, position + 1)
        logits = spec.scale * torch.einsum("hd,shd->hs", q[number].double(), keys[seen])
        if spec.soft_cap is not None:
            logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
        rows.append(torch.einsum("hs,shd->hd", logits.softmax(-1), values[seen]))
    return torch.stack(rows)


class DeviceCase:
    """rows: (tokens in the cache, tokens of this step) each, rows of one token first.

    make: from a context to the backend. dtype: of q, k, v; kv_dtype: of the pool, as dtype by
    default. layout: the pool's, by default the backend's first that fits.
    """

    def __init__(
        self,
        make: MakeBackend,
        spec: AttentionSpec,
        rows: Sequence[tuple[int, int]],
        *,
        block_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        layout: KVLayout | None = None,
    ) -> None:
        self.spec, self.rows, self.dtype = spec, list(rows), dtype
        self.device, self.block_size = torch.device(device), block_size
        self.kv_dtype = kv_dtype or dtype
        self._random = torch.Generator().manual_seed(seed)
        counts = [count for _, count in self.rows]
        self.num_tokens = sum(counts)
        self.backend = make(
            AttentionBackendContext(
                specs=(spec,),
                dtype=dtype,
                kv_dtype=self.kv_dtype,
                device=self.device,
                block_size=block_size,
                max_num_seqs=len(self.rows),
                max_num_batched_tokens=self.num_tokens,
                max_model_len=4096,
            )
        )
        layout = layout or choose_layout(self.backend.kv_layouts(spec), self.kv_dtype, block_size)
        self._make_inputs()
        self._fill(layout, seed)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._random)

    def _make_inputs(self) -> None:
        """This step's q, k and v as views of one tensor, which is how a model hands them over."""
        spec = self.spec
        sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        widest = max(spec.head_size, spec.value_head_size)
        packed = self._normal(self.num_tokens, sum(sizes), widest).to(self.dtype).to(self.device)
        heads, both = spec.num_heads, spec.num_heads + spec.num_kv_heads
        self.q, self.k = (
            packed[:, :heads, : spec.head_size],
            packed[:, heads:both, : spec.head_size],
        )
        self.v = packed[:, both:, : spec.value_head_size]
        self.cos_sin = None
        if spec.rope_dim:
            powers = torch.arange(spec.rope_dim // 2) * 2 / spec.rope_dim
            angles = torch.arange(4096)[:, None] * 100.0**-powers
            self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.device)

    def _fill(self, layout: KVLayout, seed: int) -> None:
        spec, size = self.spec, self.block_size
        needed = [-(-(context + count) // size) for context, count in self.rows]
        kv_spec = KVSpec(0, "full", spec.num_kv_heads, spec.head_size, spec.value_head_size)
        self.pool = KVPool(
            [kv_spec],
            [layout],
            num_blocks=sum(needed) + 3,
            block_size=size,
            dtype=self.kv_dtype,
            device=self.device,
            poison=True,
        )
        cache = self.pool.layers[0]
        order = np.random.default_rng(seed).permutation(np.arange(1, sum(needed) + 3))
        table = torch.zeros(len(self.rows), max(needed) + 2, dtype=torch.int32)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        taken, mapping, positions = 0, [], []
        for row, (context, count) in enumerate(self.rows):
            blocks = order[taken : taken + needed[row]]
            taken += needed[row]
            table[row, : len(blocks)] = torch.from_numpy(blocks.astype(np.int32))
            index = torch.arange(context + count)
            block = torch.from_numpy(blocks.astype(np.int64))[index // size]
            keys = self._normal(context, spec.num_kv_heads, spec.head_size).to(self.kv_dtype)
            values = self._normal(context, spec.num_kv_heads, spec.value_head_size)
            values = values.to(self.kv_dtype)
            at = (block[:context].to(self.device), (index[:context] % size).to(self.device))
            for pool, cached in ((cache.k, keys), (cache.v, values)):
                byte_view(pool)[at] = byte_view(cached).to(self.device)
            self.keys.append(keys)
            self.values.append(values)
            mapping.append(block[context:] * size + index[context:] % size)
            positions.append(index[context:])
        self.layer = AttentionLayer(0, spec, cache.k, cache.v, self.cos_sin)
        self.batch = self._batch(table, torch.cat(mapping), torch.cat(positions))

    def _batch(
        self, table: torch.Tensor, mapping: torch.Tensor, positions: torch.Tensor
    ) -> AttentionBatch:
        counts = [count for _, count in self.rows]
        decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        seq_lens = torch.tensor([sum(row) for row in self.rows], dtype=torch.int32)
        starts = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
        return AttentionBatch(
            num_tokens=self.num_tokens,
            num_rows=len(self.rows),
            num_decodes=decodes,
            max_query_len=max(counts),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=starts.to(self.device),
            seq_lens=seq_lens.to(self.device),
            block_table=table.to(self.device),
            slot_mapping=mapping.to(self.device),
            positions=positions.to(self.device),
            query_start_loc_cpu=starts.numpy(),
            seq_lens_cpu=seq_lens.numpy(),
            block_table_cpu=table.numpy(),
        )

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        if self.cos_sin is None:
            return x
        table = RopeTable(self.cos_sin, self.spec.rope_interleaved)
        cos, sin = table.rows(self.batch.positions)
        return apply_rope(x, cos, sin, interleaved=self.spec.rope_interleaved)

    def run(self, row: int | None = None) -> torch.Tensor:
        """[T, H, Dv], as the backend computes it: the whole batch, or a batch of one row. Backends
        that do not fuse rope get rotated q and k, as from the core."""
        q, k, v = self.q, self.k, self.v
        if not self.backend.fuses_rope:
            q, k = self._rotated(q), self._rotated(k)
        batch = self.batch
        if row is not None:
            batch = self._alone(row)
            start = int(self.batch.query_start_loc_cpu[row])
            q, k, v = (x[start : start + batch.num_tokens] for x in (q, k, v))
        shape = (batch.num_tokens, self.spec.num_heads, self.spec.value_head_size)
        out = torch.full(shape, math.nan, dtype=self.dtype, device=self.device)
        self.backend.plan(batch)
        self.backend.run(self.layer, q, k, v, out)
        return out

    def _alone(self, row: int) -> AttentionBatch:
        batch = self.batch
        start, stop = (int(i) for i in batch.query_start_loc_cpu[row : row + 2])
        starts = torch.tensor([0, stop - start], dtype=torch.int32)
        here, tokens = slice(row, row + 1), slice(start, stop)
        return AttentionBatch(
            num_tokens=stop - start,
            num_rows=1,
            num_decodes=int(row < batch.num_decodes),
            max_query_len=stop - start,
            max_seq_len=int(batch.seq_lens_cpu[row]),
            query_start_loc=starts.to(self.device),
            seq_lens=batch.seq_lens[here],
            block_table=batch.block_table[here],
            slot_mapping=batch.slot_mapping[tokens],
            positions=batch.positions[tokens],
            query_start_loc_cpu=starts.numpy(),
            seq_lens_cpu=batch.seq_lens_cpu[here],
            block_table_cpu=batch.block_table_cpu[here],
        )

    def expected(self) -> torch.Tensor:
        """float64[T, H, Dv] on the host."""
        q, k, v = (x.cpu() for x in (self._rotated(self.q), self._rotated(self.k), self.v))
        results, start = [], 0
        for row, (context, count) in enumerate(self.rows):
            here = slice(start, start + count)
            keys = torch.cat((self.keys[row].double(), k[here].to(self.kv_dtype).double()))
            values = torch.cat((self.values[row].double(), v[here].to(self.kv_dtype).double()))
            results.append(expected_rows(self.spec, q[here], keys, values, context))
            start += count
        return torch.cat(results)

    def check(self, tolerance: float = 1e-5) -> None:
        """Raise `AssertionError` where the backend's answer is further off than `tolerance`."""
        out = self.run().double().cpu()
        torch.testing.assert_close(out, self.expected(), atol=tolerance, rtol=tolerance)
