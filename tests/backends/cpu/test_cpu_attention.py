"""Attention against float64 over random shapes, and bit for bit whatever the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.backends.cpu import attention as cpu_attention
from octavo.backends.cpu import native
from octavo.backends.cpu.attention import CpuAttention
from octavo.backends.cpu.support import attention_probe
from octavo.core.contracts import NoOptions, Platform, ProbeContext
from octavo.core.contracts.attention_backend import (
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
)
from octavo.core.contracts.model import AttentionSpec, KVSpec
from octavo.core.errors import PluginUnavailable
from octavo.engine.worker.kv_layout import choose_layout
from octavo.engine.worker.kv_pool import KVPool

CPU = torch.device("cpu")
LONGEST = 2048
PLAIN = AttentionSpec(6, 2, 32, 32, 0.2, rope_dim=32)


def table(rope_dim: int) -> torch.Tensor:
    """Cosines and sines of every position."""
    speed = 10000.0 ** (-torch.arange(rope_dim // 2, dtype=torch.float64) * 2 / max(rope_dim, 1))
    angle = torch.arange(LONGEST, dtype=torch.float64)[:, None] * speed
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def rotated(x: torch.Tensor, spec: AttentionSpec, first: int = 0) -> torch.Tensor:
    """x[S, h, D] of positions `first` on, in float64."""
    x, half = x.double().clone(), spec.rope_dim // 2
    if not half:
        return x
    cos, sin = table(spec.rope_dim)[first : first + len(x)].double().unsqueeze(1).chunk(2, -1)
    if spec.rope_interleaved:
        a, b = x[..., : spec.rope_dim : 2].clone(), x[..., 1 : spec.rope_dim : 2].clone()
        x[..., : spec.rope_dim : 2], x[..., 1 : spec.rope_dim : 2] = (
            a * cos - b * sin,
            b * cos + a * sin,
        )
    else:
        a, b = x[..., :half].clone(), x[..., half : spec.rope_dim].clone()
        x[..., :half], x[..., half : spec.rope_dim] = a * cos - b * sin, b * cos + a * sin
    return x


def as_stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 x[S, h, D] as a pool of this type keeps it; int8 with a scale for each head."""
    if dtype != torch.int8:
        return x.to(dtype).float()
    most = x.abs().amax(-1, keepdim=True)
    return (x * (127.0 / most)).round() * (most / 127.0)


class Sequence_:
    """One sequence's q [S, H, D], k [S, K, D] and v [S, K, Dv], unrotated."""

    def __init__(self, spec: AttentionSpec, length: int, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.spec, self.length = spec, length

        def make(heads: int, size: int) -> torch.Tensor:
            return torch.randn(length, heads, size, generator=generator).to(dtype)

        self.q = make(spec.num_heads, spec.head_size)
        self.k = make(spec.num_kv_heads, spec.head_size)
        self.v = make(spec.num_kv_heads, spec.value_head_size)

    def expected(self, stored: torch.dtype) -> torch.Tensor:
        """[S, H, Dv] in float64, with keys and values rounded as the pool stores them."""
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        k = as_stored(rotated(self.k, spec).float(), stored).double().repeat_interleave(group, 1)
        v = as_stored(self.v.float(), stored).double().repeat_interleave(group, 1)
        logits = torch.einsum("qhd,khd->hqk", rotated(self.q, spec), k) * spec.scale
        if spec.soft_cap is not None:
            logits = spec.soft_cap * torch.tanh(logits / spec.soft_cap)
        query, key = torch.arange(self.length)[:, None], torch.arange(self.length)
        hidden = key > query
        if spec.window is not None:
            hidden |= key <= query - spec.window
        weights = logits.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)


class Engine:
    """A poisoned pool and a backend; sequences are computed by (sequence, first, count) rows."""

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        library: Any = None,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        blocks: int = 400,
    ) -> None:
        self.spec, self.dtype, self.block_size = spec, dtype, block_size
        kv_dtype = kv_dtype or dtype
        kv_spec = KVSpec(0, "full", spec.num_kv_heads, spec.head_size, spec.value_head_size)
        pool = KVPool(
            [kv_spec],
            [choose_layout(CpuAttention.kv_layouts(spec), kv_dtype, block_size)],
            num_blocks=blocks,
            block_size=block_size,
            dtype=kv_dtype,
            device=CPU,
            poison=True,
        )
        cos_sin = table(spec.rope_dim) if spec.rope_dim else None
        self.pool = pool
        self.layer = AttentionLayer(0, spec, pool.layers[0].k, pool.layers[0].v, cos_sin)
        context = AttentionBackendContext(
            (spec,), dtype, kv_dtype, CPU, block_size, 64, LONGEST, LONGEST
        )
        self.backend = CpuAttention(NoOptions(), context)
        if library is not None:
            self.backend._library = library
            self.backend._plans = {spec: cpu_attention.BatchPlan(library, spec)}
        # Every second block, from the top: neighbours in a sequence are not neighbours in memory.
        self.free = [*range(1, blocks, 2), *range(2, blocks, 2)]
        self.tables: dict[int, list[int]] = {}

    def step(self, rows: Sequence[tuple[Sequence_, int, int]]) -> list[torch.Tensor]:
        """Compute `count` tokens from `first` on of each sequence; [count, H, Dv] a row."""
        starts, seq_lens, slots, positions = [0], [], [], []
        for sequence, first, count in rows:
            table_ = self.tables.setdefault(id(sequence), [])
            while len(table_) * self.block_size < first + count:
                table_.append(self.free.pop())
            for position in range(first, first + count):
                block = table_[position // self.block_size]
                slots.append(block * self.block_size + position % self.block_size)
                positions.append(position)
            starts.append(starts[-1] + count)
            seq_lens.append(first + count)
        width = max(len(self.tables[id(row[0])]) for row in rows) + 1
        block_table = torch.zeros(len(rows), width, dtype=torch.int32)
        for index, (sequence, _, _) in enumerate(rows):
            ids = self.tables[id(sequence)]
            block_table[index, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        start_loc = torch.tensor(starts, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32)
        decodes = 0
        while decodes < len(rows) and rows[decodes][2] == 1:
            decodes += 1
        batch = AttentionBatch(
            num_tokens=starts[-1],
            num_rows=len(rows),
            num_decodes=decodes,
            max_query_len=max(row[2] for row in rows),
            max_seq_len=max(seq_lens),
            query_start_loc=start_loc,
            seq_lens=lens,
            block_table=block_table,
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
            query_start_loc_cpu=start_loc.numpy(),
            seq_lens_cpu=lens.numpy(),
            block_table_cpu=block_table.numpy(),
        )
        qkv = [
            torch.cat([getattr(s, name)[first : first + count] for s, first, count in rows])
            for name in "qkv"
        ]
        sizes = (self.spec.num_heads, self.spec.value_head_size)
        out = torch.full((starts[-1], *sizes), math.nan, dtype=self.dtype)
        self.backend.plan(batch)
        self.backend.run(self.layer, *qkv, out)
        return list(out.split([row[2] for row in rows]))

    def in_chunks(self, sequence: Sequence_, *chunks: int) -> torch.Tensor:
        """[S, H, Dv], computed chunk by chunk; the last chunk size repeats."""
        found, first = [], 0
        while first < sequence.length:
            size = chunks[min(len(found), len(chunks) - 1)]
            count = min(size, sequence.length - first)
            found += self.step([(sequence, first, count)])
            first += count
        return torch.cat(found)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return bool(((found.double() - expected).abs() <= tolerance * expected.abs().max()).all())


# ---- against float64 -----------------------------------------------------------------------------


@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_head_sizes_and_groups(library: Any, head_size: int, group: int) -> None:
    spec = AttentionSpec(2 * group, 2, head_size, head_size, head_size**-0.5, rope_dim=head_size)
    engine = Engine(spec, library=library)
    sequence = Sequence_(spec, 150, head_size + group, torch.float32)
    assert close(engine.in_chunks(sequence, 60), sequence.expected(torch.float32), 3e-6)


@settings(max_examples=60)
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 7]),
    head_size=st.sampled_from([8, 20, 32, 48, 72]),
    value_size=st.sampled_from([None, 8, 24, 64]),
    window=st.sampled_from([None, 1, 7, 64, 90, 300]),
    soft_cap=st.sampled_from([None, 5.0]),
    rope=st.sampled_from([0, 8, 6]),
    interleaved=st.booleans(),
    block_size=st.sampled_from([8, 16, 24, 32, 64]),
    lengths=st.lists(
        st.sampled_from([1, 15, 16, 17, 63, 64, 65, 130, 256, 257, 600]), min_size=1, max_size=3
    ),
    chunk=st.sampled_from([1, 7, 64, 100, 1000]),
    seed=st.integers(0, 10**6),
)
def test_random_shapes(
    *,
    kv_heads: int,
    group: int,
    head_size: int,
    value_size: int | None,
    window: int | None,
    soft_cap: float | None,
    rope: int,
    interleaved: bool,
    block_size: int,
    lengths: list[int],
    chunk: int,
    seed: int,
) -> None:
    spec = AttentionSpec(
        kv_heads * group,
        kv_heads,
        head_size,
        value_size or head_size,
        0.3,
        window=window,
        soft_cap=soft_cap,
        rope_dim=rope,
        rope_interleaved=interleaved,
    )
    engine = Engine(spec, block_size=block_size)
    sequences = [Sequence_(spec, n, seed + i, torch.float32) for i, n in enumerate(lengths)]
    # All but the last `chunk` tokens of each first, then the rest in one mixed batch.
    rows = []
    for sequence in sequences:
        before = max(0, sequence.length - chunk)
        if before:
            engine.step([(sequence, 0, before)])
        rows.append((sequence, before, sequence.length - before))
    rows.sort(key=lambda row: row[2] != 1)
    for (sequence, first, _), found in zip(rows, engine.step(rows), strict=True):
        assert close(found, sequence.expected(torch.float32)[first:], 1e-5)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "tolerance"),
    [
        (torch.float32, torch.bfloat16, 1e-5),
        (torch.float32, torch.float16, 1e-5),
        (torch.float32, torch.float8_e4m3fn, 1e-5),
        (torch.float32, torch.int8, 1e-5),
        (torch.bfloat16, torch.bfloat16, 5e-3),
        (torch.bfloat16, torch.float32, 5e-3),
    ],
)
def test_types_of_activations_and_pool(
    library: Any, dtype: torch.dtype, kv_dtype: torch.dtype, tolerance: float
) -> None:
    spec = replace(PLAIN, rope_dim=0)  # so that the reference rounds the very same keys
    engine = Engine(spec, library=library, dtype=dtype, kv_dtype=kv_dtype)
    sequence = Sequence_(spec, 100, 5, dtype)
    assert close(engine.in_chunks(sequence, 40, 1), sequence.expected(kv_dtype), tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_every_value_is_stored_as_torch_stores_it(library: Any, kv_dtype: torch.dtype) -> None:
    spec = AttentionSpec(1, 1, 64, 64, 1.0)
    engine = Engine(spec, library=library, kv_dtype=kv_dtype)
    sequence = Sequence_(spec, 64, 6, torch.float32)
    sequence.v = torch.logspace(-5, 2.6, 64 * 64).view(64, 1, 64) * torch.tensor(
        [1.0, -1.0]
    ).repeat(32)
    engine.step([(sequence, 0, 64)])
    blocks = torch.tensor(engine.tables[id(sequence)])
    stored = engine.layer.v_cache[blocks].flatten(0, 1)
    assert torch.equal(stored.float(), sequence.v.to(kv_dtype).float())


@pytest.mark.parametrize("size", [8, 20, 72])
def test_int8_of_odd_head_sizes(library: Any, size: int) -> None:
    spec = AttentionSpec(4, 2, size, size + 4, 0.3)
    engine = Engine(spec, library=library, kv_dtype=torch.int8)
    sequence = Sequence_(spec, 70, size, torch.float32)
    assert close(engine.in_chunks(sequence, 33), sequence.expected(torch.int8), 1e-5)
    zero = Sequence_(spec, 70, size, torch.float32)
    zero.k[:], zero.v[:] = 0.0, 0.0
    assert not engine.in_chunks(zero, 33).any()


def test_keys_are_stored_rotated() -> None:
    engine = Engine(PLAIN)
    sequence = Sequence_(PLAIN, 40, 7, torch.float32)
    engine.step([(sequence, 0, 40)])
    stored = engine.layer.k_cache[torch.tensor(engine.tables[id(sequence)])].flatten(0, 1)[:40]
    assert close(stored, rotated(sequence.k, PLAIN), 1e-6)


# ---- bit for bit ---------------------------------------------------------------------------------

BITS = [
    PLAIN,
    replace(PLAIN, window=100),
    AttentionSpec(3, 3, 80, 80, 0.1, soft_cap=20.0),
    AttentionSpec(16, 1, 24, 40, 0.2),
]


@pytest.mark.parametrize("spec", BITS)
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_chunks_change_no_bit(library: Any, spec: AttentionSpec, kv_dtype: torch.dtype) -> None:
    sequence = Sequence_(spec, 330, 11, torch.float32)
    whole = Engine(spec, library=library, kv_dtype=kv_dtype).in_chunks(sequence, 330)
    for block_size, chunks in (
        (16, (1,)),
        (8, (7,)),
        (32, (64,)),
        (64, (300, 1)),
        (24, (13, 200, 2)),
    ):
        engine = Engine(spec, library=library, kv_dtype=kv_dtype, block_size=block_size)
        assert torch.equal(engine.in_chunks(sequence, *chunks), whole), (block_size, chunks)


@pytest.mark.parametrize("spec", BITS)
def test_company_and_threads_change_no_bit(library: Any, spec: AttentionSpec) -> None:
    sequences = [
        Sequence_(spec, length, 20 + length, torch.float32) for length in (700, 1, 300, 64)
    ]
    alone = [Engine(spec, library=library).in_chunks(sequence, 1000) for sequence in sequences]
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            engine = Engine(spec, library=library)
            for sequence in sequences:
                if sequence.length > 1:
                    engine.step([(sequence, 0, sequence.length // 2)])
            rows = [(s, s.length // 2, s.length - s.length // 2) for s in sequences]
            for order in (rows[1:] + rows[:1], rows):
                for (sequence, first, _), found in zip(order, engine.step(order), strict=True):
                    assert torch.equal(found, alone[sequences.index(sequence)][first:])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [2, 3])
def test_one_long_request_is_split_without_a_trace(threads: int) -> None:
    """A single decode over a long context is cut into parts that several threads share."""
    sequence = Sequence_(PLAIN, 1500, 30, torch.float32)
    engine, before = Engine(PLAIN), torch.get_num_threads()
    engine.step([(sequence, 0, 1499)])
    try:
        torch.set_num_threads(1)
        one = engine.step([(sequence, 1499, 1)])[0]
        torch.set_num_threads(threads)
        assert torch.equal(engine.step([(sequence, 1499, 1)])[0], one)
    finally:
        torch.set_num_threads(before)
    assert close(one, sequence.expected(torch.float32)[1499:], 3e-6)


@pytest.mark.parametrize("spec", BITS)
def test_instruction_sets_give_the_same_bits(library: Any, spec: AttentionSpec) -> None:
    if library.octavo_isa() == b"generic":
        pytest.skip("plain C without fused multiply-add rounds twice")
    sequence = Sequence_(spec, 90, 40, torch.float32)
    here = Engine(spec, library=library).in_chunks(sequence, 50)
    assert torch.equal(here, Engine(spec, library=native.kernels()).in_chunks(sequence, 90))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_a_broken_token_stays_in_its_own_sequence_and_future(kv_dtype: torch.dtype) -> None:
    """NaN in one token's value reaches later queries of that sequence, and nothing else."""
    clean = [Sequence_(PLAIN, 80, 50 + i, torch.float32) for i in range(2)]
    rows = [(sequence, 0, 80) for sequence in clean]
    expected = Engine(PLAIN, kv_dtype=kv_dtype).step(rows)
    clean[0].v[30, :, 3] = math.nan
    found = Engine(PLAIN, kv_dtype=kv_dtype).step(rows)
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[0][:30], expected[0][:30])
    assert found[0][30:, :, 3].isnan().all()


# ---- choosing ------------------------------------------------------------------------------------


def test_what_it_cannot_do_is_said() -> None:
    here = Platform("cpu")
    assert CpuAttention.supports(PLAIN, here) is None
    for change, reason in (
        ({"sinks": True}, "attention sinks"),
        ({"alibi": True}, "ALiBi"),
        ({"latent": True}, "latent attention"),
        ({"num_kv_heads": 4}, "6 query heads cannot be divided evenly among 4 KV heads"),
        ({"head_size": 600}, "head size 600 is above"),
    ):
        answer = CpuAttention.supports(replace(PLAIN, **change), here)
        assert answer is not None
        assert reason in answer
        assert not attention_probe(
            ProbeContext(here, {"attention_specs": [replace(PLAIN, **change)]})
        )
    assert "cuda" in (CpuAttention.supports(PLAIN, Platform("cuda")) or "")
    assert attention_probe(ProbeContext(here, {"attention_specs": [PLAIN], "dtype": "float32"}))
    assert not attention_probe(ProbeContext(here, {"dtype": "float16"}))


def test_float16_is_refused() -> None:
    with pytest.raises(PluginUnavailable, match=r"not torch\.float16"):
        Engine(PLAIN, dtype=torch.float16)
