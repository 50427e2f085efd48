"""Every attention backend on a GPU against float64 on the host, by the cases of the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from octavo.core.contracts import NoOptions, Platform
from octavo.testing.device_attention import DeviceCase, attention_spec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {F32: 1e-3, F16: 4e-3, BF16: 3e-2}
ROWS = [(700, 1), (0, 1), (5, 1), (130, 1), (17, 9), (0, 200), (300, 65)]


def torch_backend(context):
    from octavo.backends.attention.torch_attention import TorchAttention

    return TorchAttention(NoOptions(), context)


def triton_backend(context):
    from octavo.backends.triton.attention import TritonAttention
    from octavo.backends.triton.options import TritonAttentionOptions

    return TritonAttention(TritonAttentionOptions(), context)


def flex_backend(context):
    from octavo.backends.attention.flex_attention import FlexAttention
    from octavo.backends.attention.flex_options import FlexOptions

    return FlexAttention(FlexOptions(), context)


def flashinfer_backend(context, **options):
    from octavo.backends.flashinfer.attention import FlashInferAttention
    from octavo.backends.flashinfer.options import FlashInferOptions

    return FlashInferAttention(FlashInferOptions(**options), context)


def phased_backend(context):
    from octavo.engine.worker.phased_attention import PhasedAttention

    return PhasedAttention(flashinfer_backend(context), triton_backend(context), context)


BACKENDS = {
    "torch": torch_backend,
    "triton": triton_backend,
    "flex": flex_backend,
    "flashinfer": flashinfer_backend,
    "flashinfer+triton": phased_backend,
}


@pytest.fixture
def make_case(device, rehearsing):
    """A case on the device; in a rehearsal short, and in float32, which the interpreter has."""

    def make_case(make, spec, rows=ROWS, *, dtype=BF16, **others):
        if rehearsing:
            dtype = F32
            if rows is ROWS:
                rows = [(min(context, 40), min(count, 20)) for context, count in rows]
        return DeviceCase(make, spec, rows, dtype=dtype, device=device, **others)

    return make_case


@pytest.fixture
def check(make_case, require_flashinfer):
    def check(name, spec, *, dtype=BF16, **others):
        reason = _unsupported(name, spec, others.get("kv_dtype"))
        if reason:
            pytest.skip(reason)
        if "flashinfer" in name:
            require_flashinfer()
        case = make_case(BACKENDS[name], spec, dtype=dtype, **others)
        case.check(TOLERANCE[dtype])

    return check


def _unsupported(name, spec, kv_dtype):
    from octavo.backends.flashinfer import support

    if "flashinfer" not in name:
        return None
    if kv_dtype == E5M2 and not support.kernels("float8_e5m2").for_auto:
        return support.kernels("float8_e5m2").reason
    return support.unsupported(spec, Platform("cuda", torch.cuda.get_device_capability()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    "spec",
    [
        attention_spec(8, 2, 64, rope_dim=64),
        attention_spec(8, 8, 128, rope_dim=64, rope_interleaved=True),
        attention_spec(32, 4, 128, window=100, rope_dim=128),
        attention_spec(8, 4, 256, soft_cap=30.0, window=64),
        attention_spec(6, 2, 80),
        attention_spec(7, 1, 96),
    ],
    ids=["gqa64", "mha128", "window128", "softcap256", "gqa80", "mqa96"],
)
def test_attention(check, backend, dtype, spec):
    check(backend, spec, dtype=dtype)


@pytest.mark.parametrize("backend", ["triton", "torch", "flex"])
def test_attention_in_float32(check, backend):
    check(backend, attention_spec(8, 2, 64, rope_dim=64), dtype=F32)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_attention_over_an_fp8_cache(check, backend, kv_dtype):
    check(backend, attention_spec(8, 2, 128, rope_dim=128), kv_dtype=kv_dtype)


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "flex"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_attention_in_blocks(check, backend, block_size):
    if backend == "flex" and block_size == 8:
        pytest.skip("flex takes blocks of 16 tokens at least")
    check(backend, attention_spec(8, 2, 128), block_size=block_size)


def test_attention_with_a_shared_prefix(make_case, rehearsing, require_flashinfer):
    require_flashinfer()
    rows = [(100 + i, 1) for i in range(12)]
    spec = attention_spec(8, 2, 128)

    def make(context):
        if rehearsing:
            return triton_backend(context)
        return flashinfer_backend(context, cascade_min_rows=4, cascade_min_tokens=32)

    case = make_case(make, spec, rows)
    blocks = case.batch.block_table_cpu[0, :5].copy()
    for row in range(2, 12):
        case.batch.block_table_cpu[row, :5] = blocks
        case.keys[row][:80], case.values[row][:80] = case.keys[0][:80], case.values[0][:80]
    case.batch.block_table.copy_(torch.from_numpy(case.batch.block_table_cpu))
    case.check(TOLERANCE[BF16])
    assert rehearsing or case.backend._step.shared is not None


def shorten(case, row, tokens):
    """The sequence of a decode row ends earlier: its new token comes in the place of an old one."""
    context, _ = case.rows[row]
    case.rows[row] = (context - tokens, 1)
    case.keys[row], case.values[row] = (x[row][:-tokens] for x in (case.keys, case.values))
    # Set, not lowered: on a CPU both are one.
    case.batch.seq_lens_cpu[row] = case.batch.seq_lens[row] = context - tokens + 1
    position = context - tokens
    case.batch.positions[row] = position
    block = int(case.batch.block_table_cpu[row, position // case.block_size])
    case.batch.slot_mapping[row] = block * case.block_size + position % case.block_size


def null_rows(batch, count):
    """A batch of decodes that read and write the null block alone, like one that is captured."""
    device = batch.positions.device
    starts, lengths = np.arange(count + 1, dtype=np.int32), np.ones(count, np.int32)
    table = np.zeros((count, batch.block_table.shape[1]), np.int32)
    zeros = torch.zeros(count, dtype=torch.int64, device=device)
    return dataclasses.replace(
        batch,
        num_tokens=count,
        num_rows=count,
        num_decodes=count,
        max_query_len=1,
        max_seq_len=1,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(lengths).to(device),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=zeros,
        positions=zeros,
        query_start_loc_cpu=starts,
        seq_lens_cpu=lengths,
        block_table_cpu=table,
    )


def captured(run):
    """The replay of a graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_attention_of_decodes_in_a_captured_graph(
    make_case, rehearsing, require_flashinfer, backend
):
    """Captured once, replayed with other queries and shorter rows in the same buffers."""
    if backend == "flashinfer":
        require_flashinfer()
    rows = [(700, 1), (0, 1), (5, 1), (130, 1)]
    spec = attention_spec(8, 2, 128, rope_dim=128 if backend == "triton" else 0)

    def make(context):
        return BACKENDS[backend](dataclasses.replace(context, graph_batch_sizes=(2, 4)))

    case = make_case(make, spec, rows)
    out = torch.empty(4, 8, 128, dtype=case.dtype, device=case.device)

    def run():
        case.backend.run(case.layer, case.q, case.k, case.v, out)

    case.backend.plan(case.batch)
    replay = run if rehearsing else captured(run)
    case.q.normal_()
    shorten(case, row=0, tokens=case.rows[0][0] // 2)
    # Graphs of other sizes share buffers with this one.
    case.backend.plan(null_rows(case.batch, 2))
    case.backend.plan(case.batch)
    out.zero_()
    replay()
    expected = case.expected()
    torch.testing.assert_close(out.double().cpu(), expected, atol=3e-2, rtol=3e-2)
