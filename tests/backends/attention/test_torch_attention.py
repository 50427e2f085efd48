"""The reference backend against a loop over every query, head and cached token."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.attention import torch_attention
from octavo.backends.attention.torch_attention import TorchAttention
from octavo.core.contracts import NoOptions, Platform
from octavo.core.contracts.model import AttentionSpec
from octavo.testing.attention_case import AttentionCase


def case(made, block_size, rows, seed, **dtypes):
    """Rows with a random context in a poisoned pool."""
    return AttentionCase(
        lambda context: TorchAttention(NoOptions(), context),
        TorchAttention.kv_layouts(made)[0],
        made,
        rows,
        block_size=block_size,
        seed=seed,
        **dtypes,
    )


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
    case(made, block_size, rows or [(0, 1)], seed).check()


def test_decodes_of_very_different_lengths_fall_into_buckets():
    rows = [(length, 1) for length in (500, 3, 90, 130, 480, 0, 1)]
    made = case(spec(), 16, rows, 1)
    made.check()
    sizes = sorted(bucket.size for bucket in made.backend._plans[None].buckets)
    assert sizes == [2, 2, 3]
    gathered = sum(bucket.size * bucket.length for bucket in made.backend._plans[None].buckets)
    assert gathered < 2 * sum(length + 1 for length, _ in rows)


def test_long_chunks_are_sliced_and_masks_need_not_be_kept(monkeypatch):
    rows = [(20, 1), (13, 70), (0, 33)]
    for made in (spec(), spec(window=9), spec(window=9, soft_cap=2.0)):
        monkeypatch.setattr(torch_attention, "_QUERY_SLICE", 16)
        monkeypatch.setattr(torch_attention, "_KEPT_MASK", 700)
        case(made, 4, rows, 2).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    case(spec(), 4, [(9, 1), (30, 1), (5, 6)], 3, dtype=dtype).check(tolerance=2e-2)


def test_a_pool_of_another_dtype():
    made = case(spec(), 4, [(9, 1), (30, 1), (5, 6), (0, 4)], 4, kv_dtype=torch.bfloat16)
    made.check(tolerance=1e-3)


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
