"""A batch for one attention layer in a poisoned pool, and what float64 loops make of it.

Legend as in `octavo.core.contracts.attention_backend`.
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
from octavo.engine.worker.kv_pool import KVPool
from octavo.kernels import RopeTable, apply_rope

CPU = torch.device("cpu")
LONGEST = 4096

Rows = Sequence[tuple[int, int]]
"""(tokens in the cache before the step, tokens that the step computes) of each row."""


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes of the heads (Press et al., "Train Short, Test Long", ICLR 2022, section 3)."""

    def powers(count: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / count) for i in range(count)]

    whole = 2 ** int(math.log2(num_heads))
    return powers(whole) + powers(2 * whole)[::2][: num_heads - whole]


def attend(
    spec: AttentionSpec,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
) -> torch.Tensor:
    """One query [H, D] at `position` over keys [S, K, D] and values [S, K, Dv], by loops in
    float64: [H, Dv]."""
    group = spec.num_heads // spec.num_kv_heads
    slopes = alibi_slopes(spec.num_heads) if spec.alibi else [0.0] * spec.num_heads
    low = 0 if spec.window is None else max(0, position - spec.window + 1)
    rows = []
    for head in range(spec.num_heads):
        kv_head, logits = head // group, []
        for token in range(low, position + 1):
            logit = spec.scale * float(q[head].double() @ keys[token, kv_head].double())
            if spec.soft_cap is not None:
                logit = spec.soft_cap * math.tanh(logit / spec.soft_cap)
            logits.append(logit - slopes[head] * (position - token))
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        rows.append(weights @ values[low : position + 1, kv_head].double())
    return torch.stack(rows)


class AttentionCase:
    """make: the backend for a context. rows: decodes (one token) first. layout: of the pool, the
    backend's first by default."""

    def __init__(
        self,
        make: Callable[[AttentionBackendContext], AttentionBackend],
        layout: KVLayout,
        spec: AttentionSpec,
        rows: Rows,
        *,
        block_size: int = 16,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec, self.rows, self.dtype, self.block_size = spec, list(rows), dtype, block_size
        self.kv_dtype = kv_dtype or dtype
        torch.manual_seed(seed)
        num_blocks = sum(-(-sum(row) // block_size) for row in rows) + 3
        order = np.random.default_rng(seed).permutation(np.arange(1, num_blocks)).tolist()
        self.pool = KVPool(
            [KVSpec(0, "full", spec.num_kv_heads, spec.head_size, spec.value_head_size)],
            [layout],
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.kv_dtype,
            device=CPU,
            poison=True,
        )
        self.backend = make(
            AttentionBackendContext(
                specs=(spec,),
                dtype=dtype,
                kv_dtype=self.kv_dtype,
                device=CPU,
                block_size=block_size,
                max_num_seqs=len(rows),
                max_num_batched_tokens=max(1, sum(sum(row) for row in rows)),
                max_model_len=LONGEST,
            )
        )
        self.cos_sin = self._rope_table()
        cache = self.pool.layers[0]
        fused = self.cos_sin if self.backend.fuses_rope else None
        self.layer = AttentionLayer(0, spec, cache.k, cache.v, fused)
        width = max(-(-sum(row) // block_size) for row in rows) + 2
        self.table = torch.zeros(len(rows), width, dtype=torch.int32)
        for row, lengths in enumerate(rows):
            for index in range(-(-sum(lengths) // block_size)):
                self.table[row, index] = order.pop()
        self.q, self.k, self.v = [], [], []
        for lengths in rows:
            # As views of one tensor, which is how a model hands them over.
            sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            size = max(spec.head_size, spec.value_head_size)
            made = torch.randn(sum(lengths), sum(sizes), size).to(dtype)
            q, k, v = torch.split(made, list(sizes), dim=1)
            self.q.append(q[..., : spec.head_size])
            self.k.append(k[..., : spec.head_size])
            self.v.append(v[..., : spec.value_head_size])

    def _rope_table(self) -> torch.Tensor | None:
        if not self.spec.rope_dim:
            return None
        half = self.spec.rope_dim // 2
        angles = torch.outer(torch.arange(LONGEST).float(), 100.0 ** (-torch.arange(half) / half))
        return torch.cat((angles.cos(), angles.sin()), dim=-1)

    def _rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.cos_sin is None:
            return x
        cos, sin = RopeTable(self.cos_sin, self.spec.rope_interleaved).rows(positions)
        return apply_rope(x, cos, sin, interleaved=self.spec.rope_interleaved)

    # ---- running ----------------------------------------------------------------------------

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        """A step that computes tokens [first, last) of `row` for each (row, first, last)."""
        size = self.block_size
        starts = np.cumsum([0, *(last - first for _, first, last in parts)]).astype(np.int32)
        positions = np.concatenate([np.arange(first, last) for _, first, last in parts])
        rows = np.concatenate([np.full(last - first, row) for row, first, last in parts])
        table = self.table[[row for row, _, _ in parts]].contiguous()
        blocks = self.table.numpy()[rows, positions // size].astype(np.int64)
        seq_lens = np.asarray([last for _, _, last in parts], np.int32)
        counts = [last - first for _, first, last in parts]
        num_decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
        return AttentionBatch(
            num_tokens=int(starts[-1]),
            num_rows=len(parts),
            num_decodes=num_decodes,
            max_query_len=max(counts),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_table=table,
            slot_mapping=torch.from_numpy(blocks * size + positions % size),
            positions=torch.from_numpy(positions.astype(np.int64)),
            query_start_loc_cpu=starts,
            seq_lens_cpu=seq_lens,
            block_table_cpu=table.numpy(),
        )

    def step(self, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Plan and run such a step: [T, H, Dv], from an output full of NaN."""
        batch = self.batch(parts)
        self.backend.plan(batch)
        return self.attention(batch, parts)

    def attention(
        self, batch: AttentionBatch, parts: Sequence[tuple[int, int, int]]
    ) -> torch.Tensor:
        """Run one layer of a planned batch."""
        q, k, v = (
            torch.cat([tensors[row][first:last] for row, first, last in parts])
            for tensors in (self.q, self.k, self.v)
        )
        if not self.backend.fuses_rope:
            q, k = self._rotated(q, batch.positions), self._rotated(k, batch.positions)
        shape = (batch.num_tokens, self.spec.num_heads, self.spec.value_head_size)
        out = torch.full(shape, math.nan, dtype=self.dtype)
        self.backend.run(self.layer, q, k, v, out)
        return out

    def contexts(self) -> list[tuple[int, int, int]]:
        """Parts of a step that computes what shall be in the cache."""
        parts = [(row, 0, context) for row, (context, _) in enumerate(self.rows) if context]
        return sorted(parts, key=lambda part: part[2] != 1)

    def this_step(self) -> list[tuple[int, int, int]]:
        """Parts of the step itself."""
        return [(row, context, context + count) for row, (context, count) in enumerate(self.rows)]

    def run(self) -> torch.Tensor:
        """Fill the cache, then run the step: [T, H, Dv]."""
        if self.contexts():
            self.step(self.contexts())
        return self.step(self.this_step())

    def expected(self) -> torch.Tensor:
        """float64[T, H, Dv] of the step."""
        results = []
        for row, first, last in self.this_step():
            positions = torch.arange(last)
            keys = self._rotated(self.k[row][:last], positions).to(self.kv_dtype)
            queries = self._rotated(self.q[row][:last], positions)
            values = self.v[row][:last].to(self.kv_dtype)
            results += [
                attend(self.spec, queries[position], keys, values, position)
                for position in range(first, last)
            ]
        return torch.stack(results)

    def check(self, tolerance: float = 1e-5) -> None:
        """Run, and compare with `expected`."""
        out, wanted = self.run().double(), self.expected()
        assert not out.isnan().any(), "outputs are NaN: not written, or read from unwritten cache"
        error = float((out - wanted).abs().max())
        bound = tolerance * (1 + float(wanted.abs().max()))
        assert error <= bound, f"differs by {error:.3g} from float64, allowed {bound:.3g}"
