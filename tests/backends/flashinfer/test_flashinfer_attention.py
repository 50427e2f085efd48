"""What the attention backend `flashinfer` tells the library: right answers come out of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from octavo.backends.flashinfer.options import FlashInferOptions
from octavo.backends.flashinfer.support import probe, unsupported
from octavo.core.contracts import NoOptions, Platform, ProbeContext
from octavo.core.contracts.attention_backend import AttentionBackendContext, KVLayout
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.errors import PluginUnavailable
from octavo.testing.device_attention import DeviceCase, attention_spec

ROWS = [(40, 1), (0, 1), (5, 1), (17, 9), (0, 20)]
GRAPH = (1, 2, 4)


FLOAT32 = KVLayout(("kv", "block", "token", "head", "dim"))
"""The double computes in any dtype, and float32 shows a wrong token best."""


def make(graphs=(), **options):
    from octavo.backends.flashinfer.attention import FlashInferAttention

    values = FlashInferOptions(workspace_bytes=2**20, **options)
    return lambda context: FlashInferAttention(
        values, dataclasses.replace(context, graph_batch_sizes=graphs)
    )


def limits(*specs):
    """A context of few rows and tokens."""
    dtype = torch.float32
    return AttentionBackendContext(specs, dtype, dtype, torch.device("cpu"), 16, 4, 8, 64)


@pytest.mark.parametrize(
    "spec",
    [
        attention_spec(4, 2, 64),
        attention_spec(4, 4, 64, window=7),
        attention_spec(8, 1, 64, window=30, soft_cap=0.5, rope_dim=64),
    ],
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_plan_computes_every_row(library, spec, block_size):
    DeviceCase(make(), spec, ROWS, block_size=block_size, layout=FLOAT32).check()
    assert len(library.named("decode.plan")) == len(library.named("prefill.plan")) == 1
    assert not library.named("cascade.plan")


def test_what_is_planned(library):
    spec = attention_spec(8, 2, 64, window=7, soft_cap=30.0)
    DeviceCase(make(), spec, ROWS, dtype=torch.bfloat16).check(5e-2)
    wanted = {
        "num_qo_heads": 8,
        "num_kv_heads": 2,
        "page_size": 16,
        "pos_encoding_mode": "NONE",
        "window_left": 6,
        "logits_soft_cap": 30.0,
        "sm_scale": spec.scale,
        "q_data_type": torch.bfloat16,
        "kv_data_type": torch.bfloat16,
        "o_data_type": torch.bfloat16,
    }
    (decode,), (prefill,) = library.named("decode.plan"), library.named("prefill.plan")
    for plan in (decode, prefill):
        assert {name: plan[name] for name in wanted} == wanted
    assert decode["head_dim"] == prefill["head_dim_qk"] == 64
    assert prefill["causal"] is True
    assert prefill["qo_indptr"].tolist() == [0, 9, 29]
    # The library needs these on the host: tensors of the device would make it wait.
    for plan, names in (
        (decode, ("indptr", "last_page_len")),
        (prefill, ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")),
    ):
        assert all(plan[name].device.type == "cpu" for name in names)
        assert all(plan[name].dtype == torch.int32 for name in names)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "kv_dtype", "wanted"),
    [
        (2, 2, None, False),
        (4, 2, None, False),
        (8, 2, None, True),
        (6, 2, None, True),
        (2, 2, torch.float8_e4m3fn, True),
    ],
)
def test_tensor_cores_where_they_pay(library, heads, kv_heads, kv_dtype, wanted):
    spec = attention_spec(heads, kv_heads, 64)
    DeviceCase(make(), spec, [(3, 1)], dtype=torch.float16, kv_dtype=kv_dtype)
    (made,) = library.named("decode.__init__")
    assert made["use_tensor_cores"] is wanted


def test_an_fp8_cache_gets_values_of_its_dtype(library):
    case = DeviceCase(
        make(), attention_spec(4, 2, 64), ROWS, kv_dtype=torch.float8_e4m3fn, dtype=torch.float16
    )
    case.check(5e-3)
    assert library.named("decode.plan")[0]["kv_data_type"] == torch.float8_e4m3fn
    assert library.named("append_paged_kv_cache")[0]["append_key"].dtype == torch.float8_e4m3fn


def test_batches_of_captured_sizes_keep_their_buffers(library):
    spec = attention_spec(4, 2, 64)
    case = DeviceCase(make(GRAPH), spec, ROWS[:2], layout=FLOAT32)
    made = library.named("decode.__init__")
    assert [call["use_cuda_graph"] for call in made] == [False, True, True, True]
    assert [len(call["paged_kv_indptr_buffer"]) for call in made[1:]] == [2, 3, 5]
    case.check()
    (plan,) = library.named("decode.plan")
    assert plan["self"].made["paged_kv_indptr_buffer"] is made[2]["paged_kv_indptr_buffer"]
    appended = library.named("append_paged_kv_cache")[0]
    case.check()
    again = library.named("append_paged_kv_cache")[1]
    for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len"):
        assert appended[name].data_ptr() == again[name].data_ptr(), name
    assert len(library.named("decode.__init__")) == 4


def test_captured_sizes_share_what_a_plan_writes_anew(library):
    specs = attention_spec(4, 2, 64), attention_spec(4, 2, 64, window=7)
    make(GRAPH)(limits(*specs))
    made = [call for call in library.named("decode.__init__") if call["use_cuda_graph"]]
    for name in ("paged_kv_indptr_buffer", "paged_kv_indices_buffer"):
        assert len({call[name].data_ptr() for call in made}) == 1
    # Room for as many pages as any of them can have.
    assert {len(call["paged_kv_indices_buffer"]) for call in made} == {4 * 64 // 16}
    given = library.named("decode.reset_workspace_buffer")
    assert len(given) == 6
    assert len({call["float_workspace_buffer"].data_ptr() for call in given}) == 1
    # Layers of both kinds run in a step: each has plans of its own.
    assert len({call["int_workspace_buffer"].data_ptr() for call in given}) == 2


@pytest.mark.parametrize("rows", [1, 256, 4096])
def test_the_int_workspace_holds_any_plan(rows):
    """By the library's planner: a plan has 17 bytes for each tile, 8 for each row, and a few. There
    are at most 32 programs a multiprocessor, and one tile for every 16 query heads of a KV head."""
    from octavo.backends.flashinfer.wrappers import _INT_BYTES, _INT_BYTES_ROW

    tiles = max(32 * 256, rows * 64 // 16)
    assert 17 * tiles + 8 * (rows + 1) + 1024 <= _INT_BYTES + _INT_BYTES_ROW * rows


def test_decodes_use_the_same_kernels_captured_or_not(library):
    make(GRAPH)(limits(attention_spec(4, 2, 64)))
    assert {call["backend"] for call in library.named("decode.__init__")} == {"fa2"}
    assert {call["backend"] for call in library.named("prefill.__init__")} == {"auto"}


def test_values_beyond_the_range_of_an_fp8_cache_are_its_largest(library):
    from octavo.backends.attention.cache_dtype import to_cache_dtype

    x = torch.tensor([1e4, -1e6, 3.0]).bfloat16()
    assert to_cache_dtype(x, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 3.0]
    assert to_cache_dtype(x, torch.float8_e5m2).float().tolist() == [10240.0, -57344.0, 3.0]
    assert to_cache_dtype(x, torch.float32).tolist() == [float(v) for v in x]


def test_a_batch_beyond_the_limits_leaves_captured_addresses_alone(library):
    spec = attention_spec(4, 2, 64)
    backend = make()(limits(spec))
    for rows in ([(3, 1)], [(0, 20)], [(5, 1), (9, 1)]):
        DeviceCase(lambda _: backend, spec, rows, layout=FLOAT32).check()
    first, large, last = library.named("append_paged_kv_cache")
    assert first["positions"].data_ptr() == last["positions"].data_ptr()
    assert first["positions"].data_ptr() != large["positions"].data_ptr()


def test_a_size_that_is_not_captured_uses_the_plain_wrapper(library):
    DeviceCase(make(GRAPH), attention_spec(4, 2, 64), ROWS[:3], layout=FLOAT32).check()
    (plan,) = library.named("decode.plan")
    assert plan["self"].made["use_cuda_graph"] is False


class Shared(DeviceCase):
    """Decode rows, some of which begin with the same blocks."""

    def share(self, rows, pages):
        size, first = self.block_size, rows[0]
        blocks = self.batch.block_table_cpu[first, :pages].copy()
        for row in rows:
            self.batch.block_table_cpu[row, :pages] = blocks
            self.keys[row][: pages * size] = self.keys[first][: pages * size]
            self.values[row][: pages * size] = self.values[first][: pages * size]
        self.batch.block_table.copy_(torch.from_numpy(self.batch.block_table_cpu))


@pytest.mark.parametrize("soft_cap", [None, 0.5])
@pytest.mark.parametrize(
    ("contexts", "sharing"),
    [([33, 40, 35], [0, 1, 2]), ([33, 9, 40, 50, 3], [0, 2, 3]), ([34, 35, 0], [0, 1])],
)
def test_rows_with_a_long_common_prefix_read_it_once(library, contexts, sharing, soft_cap):
    options = {"cascade_min_rows": 2, "cascade_min_tokens": 8}
    rows = [(context, 1) for context in contexts] + [(6, 5)]
    spec = attention_spec(4, 2, 64, soft_cap=soft_cap)
    case = Shared(make(**options), spec, rows, block_size=4, layout=FLOAT32)
    case.share(sharing, 8)
    case.check()
    (plan,) = library.named("cascade.plan")
    assert plan["qo_indptr_arr"][0].tolist() == [0, len(sharing)]
    assert plan["paged_kv_indptr_arr"][0].tolist() == [0, 8]
    assert len(library.named("cascade.run")) == 1
    assert len(library.named("decode.plan")) == (len(sharing) < len(contexts))


@pytest.mark.parametrize(
    ("spec", "options", "graphs"),
    [
        (attention_spec(4, 2, 64), {"cascade": False}, ()),
        (attention_spec(4, 2, 64), {"cascade_min_rows": 4}, ()),
        (attention_spec(4, 2, 64), {"cascade_min_tokens": 33}, ()),
        (attention_spec(4, 2, 64, window=20), {}, ()),
        (attention_spec(4, 2, 64), {}, (3,)),
    ],
)
def test_when_a_common_prefix_is_not_split_off(library, spec, options, graphs):
    options = {"cascade_min_rows": 2, "cascade_min_tokens": 8, **options}
    rows = [(33, 1), (40, 1), (35, 1)]
    case = Shared(make(graphs, **options), spec, rows, block_size=4, layout=FLOAT32)
    case.share([0, 1, 2], 8)
    case.check()
    assert not library.named("cascade.plan")


def test_without_a_compiler_auto_leaves_it_alone(monkeypatch):
    import importlib.util

    from octavo.backends.flashinfer.support import sampler_probe

    context = ProbeContext(Platform("cuda", (9, 0)), {})
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for answer in (probe(context), sampler_probe(context)):
        assert answer.available
        assert not answer.for_auto
        assert "nvcc" in answer.reason
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvcc")
    assert probe(context).for_auto
    monkeypatch.setattr("shutil.which", {"gcc": "/usr/bin/gcc"}.get)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert probe(context).for_auto
    assert sampler_probe(context).for_auto
    wide = probe(ProbeContext(context.platform, {"kv_dtype": "float8_e5m2"}))
    assert wide.available  # the package has kernels for e4m3 alone
    assert not wide.for_auto
    assert "those for a float8_e5m2 KV cache with nvcc" in wide.reason
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert "neither gcc nor clang" in sampler_probe(context).reason


def test_kernels_that_cannot_be_loaded_are_refused_at_start(library):
    """So that `auto` takes the next backend, and not the first step fails."""
    from octavo.backends.flashinfer.sampler import FlashInferSampler

    library.missing = "Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist"
    with pytest.raises(PluginUnavailable, match=r"cannot load its kernels: .* not find nvcc"):
        make()(limits(attention_spec(size=64)))
    with pytest.raises(PluginUnavailable, match="cannot load its kernels"):
        FlashInferSampler(NoOptions(), SamplerContext(100, 4, torch.device("cpu")))


def test_what_it_cannot_compute_is_refused_with_the_reason():
    cuda = Platform("cuda", (9, 0))
    assert unsupported(attention_spec(size=64), cuda) is None
    assert "head sizes 64, 128, 256, not 80" in unsupported(attention_spec(size=80), cuda)
    assert "head sizes differ" in unsupported(attention_spec(size=64, value_size=128), cuda)
    assert "needs cuda" in unsupported(attention_spec(size=64), Platform("cpu"))
    facts = {"attention_specs": (attention_spec(size=64),), "dtype": "bfloat16"}
    assert probe(ProbeContext(cuda, facts))
    assert "float32" in probe(ProbeContext(cuda, {**facts, "dtype": "float32"})).reason
    assert "int8" in probe(ProbeContext(cuda, {**facts, "kv_dtype": "int8"})).reason
    assert probe(ProbeContext(cuda, {**facts, "kv_dtype": "fp8"}))
