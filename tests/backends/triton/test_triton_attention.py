"""The attention backend `triton` in the interpreter, by the cases of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.core.contracts import Platform, ProbeContext
from octavo.testing.device_attention import DeviceCase, attention_spec

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of inf and NaN lanes

F16, F32 = torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {F32: 2e-5, F16: 4e-3}
ROWS = [(40, 1), (0, 1), (5, 1), (17, 9), (0, 20)]


def make(**options):
    from octavo.backends.triton.attention import TritonAttention
    from octavo.backends.triton.options import TritonAttentionOptions

    return lambda context: TritonAttention(TritonAttentionOptions(**options), context)


def check(spec, rows=ROWS, *, dtype=F32, num_splits="auto", **others):
    case = DeviceCase(make(num_splits=num_splits), spec, rows, dtype=dtype, **others)
    case.check(TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("spec", "block_size", "dtype", "kv_dtype", "num_splits"),
    [
        (attention_spec(4, 2, 64, rope_dim=64), 8, F32, None, 1),
        (attention_spec(4, 2, 64, rope_dim=64), 16, F16, None, 3),
        (attention_spec(3, 3, 80, rope_dim=80, rope_interleaved=True), 32, F32, None, 2),
        (attention_spec(7, 1, 96, window=5, rope_dim=32), 16, F16, None, 2),
        (attention_spec(2, 2, 128, soft_cap=0.5), 64, F32, None, "auto"),
        (attention_spec(2, 1, 256, value_size=64), 128, F16, None, 1),
        (attention_spec(4, 2, 32, window=30, soft_cap=2.0), 16, F32, None, 5),
        (attention_spec(4, 2, 64, rope_dim=64), 16, F32, E4M3, 2),
        (attention_spec(4, 2, 64), 16, F16, E4M3, 2),
        (attention_spec(4, 2, 64), 16, F32, E5M2, 2),
    ],
)
def test_equals_the_reference(spec, block_size, dtype, kv_dtype, num_splits):
    check(spec, dtype=dtype, block_size=block_size, kv_dtype=kv_dtype, num_splits=num_splits)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(
    ("size", "block_size"), [(64, 8), (80, 128), (96, 64), (128, 32), (256, 16)]
)
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
def test_many_shapes(dtype, block_size, size, heads):
    spec = attention_spec(*heads, size, rope_dim=size)
    rows = [(33, 1), (0, 1), (2, 5), (0, 19)]
    check(spec, rows, dtype=dtype, block_size=block_size, num_splits=2)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize("window", [None, 1, 16, 33])
def test_many_windows_and_caches(kv_dtype, dtype, window):
    spec = attention_spec(6, 2, 64, window=window, rope_dim=32)
    check(spec, [(70, 1), (31, 1), (0, 1), (33, 40)], dtype=dtype, kv_dtype=kv_dtype, num_splits=2)


def test_the_other_layout_gives_the_same_bits():
    spec = attention_spec(4, 2, 16)
    from octavo.backends.triton.attention import TritonAttention

    layouts = TritonAttention.kv_layouts(spec)
    assert len(layouts) == 2
    cases = [DeviceCase(make(), spec, ROWS, layout=layout) for layout in layouts]
    assert torch.equal(cases[0].run(), cases[1].run())


def test_with_fixed_splits_a_row_has_the_same_bits_in_any_company():
    case = DeviceCase(make(num_splits=4), attention_spec(4, 2, 16, rope_dim=16), ROWS)
    together = case.run()
    for row, start in enumerate(case.batch.query_start_loc_cpu[:-1].tolist()):
        alone = case.run(row)
        assert torch.equal(alone, together[start : start + len(alone)])


def test_tiles_cover_every_query_once():
    from octavo.backends.triton.attention import prefill_tiles

    rows, first = prefill_tiles(np.array([0, 1, 2, 12, 13, 45], np.int32), 2, 5)
    assert rows.tolist() == [2, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    assert first.tolist() == [0, 5, 0, 0, 5, 10, 15, 20, 25, 30]
    assert rows.dtype == first.dtype == np.int32


def test_the_number_of_splits_depends_on_the_batch_size_alone():
    from octavo.backends.triton.attention import MOST_SPLITS, auto_splits

    assert auto_splits(1, 1, 132) == MOST_SPLITS
    assert auto_splits(32, 8, 132) == 2
    assert auto_splits(256, 8, 132) == 1


def test_what_it_cannot_compute_is_refused_with_the_reason(monkeypatch):
    from octavo.backends.triton.support import unsupported

    cuda = Platform("cuda", (9, 0))
    assert unsupported(attention_spec(), cuda) is None
    assert "head size 320 is above 256" in unsupported(attention_spec(size=320), cuda)
    assert "compute capability 8.0, this device has 7.5" in unsupported(
        attention_spec(), Platform("cuda", (7, 5))
    )
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "runs on cuda" in unsupported(attention_spec(), Platform("cpu"))


def test_auto_leaves_triton_alone_where_nothing_can_be_launched(monkeypatch, tmp_path):
    from octavo.backends.triton.support import device

    cuda = ProbeContext(Platform("cuda", (9, 0)))
    monkeypatch.setenv("CC", "cc")
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert device(cuda).for_auto
    (tmp_path / "Python.h").unlink()
    answer = device(cuda)
    assert answer.available  # for who names it: the launchers may be cached
    assert not answer.for_auto
    assert f"{tmp_path} has no Python.h" in answer.reason
    monkeypatch.delenv("CC")
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "neither gcc nor clang" in device(cuda).reason
