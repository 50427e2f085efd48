"""The reference backend against a loop over every query, head and cached token."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.attention import torch_attention
from octavo.backends.attention.torch_attention import TorchAttention
from octavo.core.contracts import NoOptions, Platform
from octavo.core.contracts.attention_backend import (
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
)
from octavo.core.contracts.model import AttentionSpec, KVSpec
from octavo.core.runner.kv_pool import KVPool

CPU = torch.device("cpu")


def naive(spec, q, keys, values, position):
    """One query [H, D] at `position` over keys [S, K, D] and values [S, K, Dv]: [H, Dv]."""
    group = spec.num_heads // spec.num_kv_heads
    low = 0 if spec.window is None else max(0, position - spec.window + 1)
    rows = []
    for head in range(spec.num_heads):
        kv_head = head // group
        logits = []
        for token in range(low, position + 1):
            logit = spec.scale * float(q[head].double() @ keys[token, kv_head].double())
            if spec.soft_cap is not None:
                logit = spec.soft_cap * math.tanh(logit / spec.soft_cap)
            logits.append(logit)
        weights = torch.tensor(logits, dtype=torch.float64).softmax(0)
        rows.append(weights @ values[low : position + 1, kv_head].double())
    return torch.stack(rows)


class Case:
    """Rows with a random context in a poisoned pool, and this step's q, k, v."""

    def __init__(self, spec, block_size, rows, seed, *, dtype=torch.float32, kv_dtype=None):
        self.spec, self.rows, self.dtype = spec, rows, dtype
        kv_dtype = kv_dtype or dtype
        torch.manual_seed(seed)
        random = np.random.default_rng(seed)
        total_blocks = sum(-(-(context + count) // block_size) for context, count in rows)
        kv_spec = KVSpec(0, "full", spec.num_kv_heads, spec.head_size, spec.value_head_size)
        layout = TorchAttention.kv_layouts(spec)[0]
        self.pool = KVPool(
            [kv_spec],
            [layout],
            num_blocks=total_blocks + 3,
            block_size=block_size,
            dtype=kv_dtype,
            device=CPU,
            poison=True,
        )
        cache = self.pool.layers[0]
        blocks = iter(random.permutation(np.arange(1, total_blocks + 3)).tolist())
        num_tokens = sum(count for _, count in rows)
        width = max(-(-(context + count) // block_size) for context, count in rows) + 2
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        # As views of one tensor, which is how a model hands them over.
        sizes = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        size = max(spec.head_size, spec.value_head_size)
        q, k, v = torch.randn(num_tokens, sum(sizes), size).to(dtype).split(sizes, dim=1)
        self.q, self.k = q[..., : spec.head_size], k[..., : spec.head_size]
        self.v = v[..., : spec.value_head_size]
        mapping, positions, starts = [], [], [0]
        self.keys, self.values = [], []
        for row, (context, count) in enumerate(rows):
            for index in range(-(-(context + count) // block_size)):
                table[row, index] = next(blocks)
            keys = torch.randn(context, spec.num_kv_heads, spec.head_size).to(kv_dtype)
            values = torch.randn(context, spec.num_kv_heads, spec.value_head_size).to(kv_dtype)
            for position in range(context + count):
                block, offset = int(table[row, position // block_size]), position % block_size
                if position < context:
                    cache.k[block, offset], cache.v[block, offset] = (
                        keys[position],
                        values[position],
                    )
                else:
                    mapping.append(block * block_size + offset)
                    positions.append(position)
            here = slice(starts[-1], starts[-1] + count)
            self.keys.append(torch.cat((keys, self.k[here].to(kv_dtype))))
            self.values.append(torch.cat((values, self.v[here].to(kv_dtype))))
            starts.append(starts[-1] + count)
        num_decodes = 0
        while num_decodes < len(rows) and rows[num_decodes][1] == 1:
            num_decodes += 1
        seq_lens = torch.tensor([sum(row) for row in rows], dtype=torch.int32)
        start_loc = torch.tensor(starts, dtype=torch.int32)
        self.batch = AttentionBatch(
            num_tokens=num_tokens,
            num_rows=len(rows),
            num_decodes=num_decodes,
            max_query_len=max(count for _, count in rows),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=start_loc,
            seq_lens=seq_lens,
            block_table=table,
            slot_mapping=torch.tensor(mapping),
            positions=torch.tensor(positions),
            query_start_loc_cpu=start_loc.numpy(),
            seq_lens_cpu=seq_lens.numpy(),
            block_table_cpu=table.numpy(),
        )
        self.backend = TorchAttention(
            NoOptions(),
            AttentionBackendContext(
                specs=(spec,),
                dtype=dtype,
                kv_dtype=kv_dtype,
                device=CPU,
                block_size=block_size,
                max_num_seqs=len(rows),
                max_num_batched_tokens=num_tokens,
                max_model_len=4096,
            ),
        )
        self.layer = AttentionLayer(0, spec, cache.k, cache.v)

    def run(self):
        out = torch.full(
            (self.batch.num_tokens, self.spec.num_heads, self.spec.value_head_size),
            math.nan,
            dtype=self.dtype,
        )
        self.backend.plan(self.batch)
        self.backend.run(self.layer, self.q, self.k, self.v, out)
        return out

    def expected(self):
        results, token = [], 0
        for row, (context, count) in enumerate(self.rows):
            for position in range(context, context + count):
                results.append(
                    naive(self.spec, self.q[token], self.keys[row], self.values[row], position)
                )
                token += 1
        return torch.stack(results)

    def check(self, tolerance=1e-5):
        out = self.run()
        torch.testing.assert_close(out.double(), self.expected(), atol=tolerance, rtol=tolerance)


def spec(heads=4, kv_heads=2, size=8, *, value_size=None, window=None, soft_cap=None):
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        value_head_size=value_size or size,
        scale=0.7 / math.sqrt(size),
        window=window,
        soft_cap=soft_cap,
    )


contexts = st.integers(0, 40)


@settings(max_examples=60)
@given(
    made=st.builds(
        lambda kv_heads, group, size, **others: spec(kv_heads * group, kv_heads, size, **others),
        kv_heads=st.sampled_from([1, 2, 3]),
        group=st.sampled_from([1, 2, 5]),
        size=st.sampled_from([4, 8, 20]),
        value_size=st.sampled_from([None, None, 6]),
        window=st.sampled_from([None, None, 1, 5, 30]),
        soft_cap=st.sampled_from([None, None, 0.5]),
    ),
    block_size=st.sampled_from([1, 4, 16]),
    decodes=st.lists(contexts, max_size=6),
    prefills=st.lists(st.tuples(contexts, st.integers(1, 12)), max_size=3),
    seed=st.integers(0, 99),
)
def test_equals_a_naive_loop(made, block_size, decodes, prefills, seed):
    rows = [(context, 1) for context in decodes] + prefills
    Case(made, block_size, rows or [(0, 1)], seed).check()


def test_decodes_of_very_different_lengths_fall_into_buckets():
    rows = [(length, 1) for length in (500, 3, 90, 130, 480, 0, 1)]
    case = Case(spec(), 16, rows, 1)
    case.check()
    sizes = sorted(bucket.size for bucket in case.backend._plans[None].buckets)
    assert sizes == [2, 2, 3]
    gathered = sum(bucket.size * bucket.length for bucket in case.backend._plans[None].buckets)
    assert gathered < 2 * sum(length + 1 for length, _ in rows)


def test_long_chunks_are_sliced_and_masks_need_not_be_kept(monkeypatch):
    rows = [(20, 1), (13, 70), (0, 33)]
    for made in (spec(), spec(window=9), spec(window=9, soft_cap=2.0)):
        monkeypatch.setattr(torch_attention, "_QUERY_SLICE", 16)
        monkeypatch.setattr(torch_attention, "_KEPT_MASK", 700)
        Case(made, 4, rows, 2).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    Case(spec(), 4, [(9, 1), (30, 1), (5, 6)], 3, dtype=dtype).check(tolerance=2e-2)


def test_a_pool_of_another_dtype():
    case = Case(spec(), 4, [(9, 1), (30, 1), (5, 6), (0, 4)], 4, kv_dtype=torch.bfloat16)
    case.check(tolerance=1e-3)


@pytest.mark.parametrize(
    ("change", "what"),
    [({"sinks": True}, "sinks"), ({"alibi": True}, "ALiBi"), ({"latent": True}, "latent")],
)
def test_says_what_it_cannot_compute(change, what):
    values = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "value_head_size": 8,
        "scale": 1.0,
    }
    assert TorchAttention.supports(AttentionSpec(**values), Platform()) is None
    assert what in TorchAttention.supports(AttentionSpec(**values, **change), Platform())
    uneven = AttentionSpec(**{**values, "num_kv_heads": 3})
    assert "4 query heads" in TorchAttention.supports(uneven, Platform())
