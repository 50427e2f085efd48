"""The KV pool: layouts, copies, fresh memory."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.core.contracts.attention_backend import KVLayout
from octavo.core.contracts.model import KVSpec
from octavo.core.errors import CapacityError, ConfigError
from octavo.engine.worker.kv_layout import block_bytes, choose_layout
from octavo.engine.worker.kv_pool import KVPool
from octavo.engine.worker.memory import peak_resident, reset_peak_resident
from octavo.engine.worker.side_stream import CudaSideStream

CPU = torch.device("cpu")
LAYOUTS = [
    ("kv", "block", "token", "head", "dim"),
    ("block", "kv", "head", "token", "dim"),
    ("block", "token", "kv", "dim", "head"),
]


def pool_of(layout=LAYOUTS[0], *, value_size=8, num_groups=1, extra=0, **options):
    specs = [
        KVSpec(layer, "full", 2, 8, value_size, group=layer % num_groups) for layer in range(2)
    ]
    values = {"num_blocks": 6, "block_size": 4, "dtype": torch.float32, "device": CPU, **options}
    return KVPool(specs, [KVLayout(layout, extra=extra)] * 2, **values)


def fill(pool, host=False):
    for number, cache in enumerate(pool.layers):
        parts = (cache.host_k, cache.host_v) if host else (cache.k, cache.v)
        for which, part in enumerate(parts):
            values = torch.arange(part.numel(), dtype=torch.float32).view(part.shape)
            part.copy_(values + 10000 * number + 100000 * which + 1e6 * host)


def copies(*rows):
    return np.asarray(rows, np.int32).T


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value_size", [8, 5])
def test_views_have_the_logical_shape_in_any_layout(layout, value_size):
    pool = pool_of(layout, value_size=value_size)
    for cache in pool.layers:
        assert cache.k.shape == (6, 4, 2, 8)
        assert cache.v.shape == (6, 4, 2, value_size)
        assert not cache.k.any()
        inner = cache.k.stride(("block", "token", "head", "dim").index(layout[-1]))
        assert inner == 1
    fill(pool)  # no element belongs to two views
    k, v = pool.layers[0].k, pool.layers[0].v
    assert k.flatten().tolist() == list(range(k.numel()))
    assert v.flatten().tolist() == [100000 + i for i in range(v.numel())]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_and_partial_copies(layout):
    pool = pool_of(layout)
    fill(pool)
    before = [(cache.k.clone(), cache.v.clone()) for cache in pool.layers]
    pool.copy(copies((0, 0, 1, 3, 4), (0, 0, 2, 4, 3)))
    for cache, pair in zip(pool.layers, before, strict=True):
        for part, old in zip((cache.k, cache.v), pair, strict=True):
            expected = old.clone()
            expected[3] = old[1]
            expected[4, :3] = old[2, :3]
            assert torch.equal(part, expected)


def test_copies_run_in_order_when_they_depend_on_each_other():
    pool = pool_of()
    fill(pool)
    old = pool.layers[1].v.clone()
    pool.copy(copies((0, 0, 1, 2, 4), (0, 0, 2, 3, 2), (0, 0, 4, 2, 1)))
    part = pool.layers[1].v
    assert torch.equal(part[3, :2], old[1, :2])
    assert torch.equal(part[3, 2:], old[3, 2:])
    assert torch.equal(part[2, :1], old[4, :1])
    assert torch.equal(part[2, 1:], old[1, 1:])


def test_copies_touch_their_own_group_only():
    pool = pool_of(num_groups=2)
    fill(pool)
    old = [cache.k.clone() for cache in pool.layers]
    pool.copy(copies((0, 1, 1, 2, 4)))
    assert torch.equal(pool.layers[0].k, old[0])
    assert torch.equal(pool.layers[1].k[2], old[1][1])


def test_swapped_blocks_come_back():
    pool = pool_of(num_host_blocks=3)
    fill(pool)
    old = pool.layers[0].k.clone()
    pool.copy(copies((1, 0, 2, 1, 4), (1, 0, 3, 2, 4), (0, 0, 1, 2, 4), (2, 0, 1, 5, 4)))
    part = pool.layers[0].k
    assert torch.equal(part[5], old[2])
    assert torch.equal(part[2], old[1])
    assert torch.equal(pool.layers[0].host_k[2], old[3])


class FakeCuda:
    """What `CudaSideStream` uses of `torch.cuda`; writes down the order of events."""

    def __init__(self):
        self.log = []

    def current_stream(self, device):
        return self.FakeStream(self.log, "compute")

    def Stream(self, device):
        return self.FakeStream(self.log, "side")

    @contextlib.contextmanager
    def stream(self, stream):
        self.log.append(f"enter {stream.name}")
        yield
        self.log.append(f"leave {stream.name}")

    def Event(self, enable_timing):
        return self.FakeEvent(self.log)

    @dataclass
    class FakeStream:
        log: list
        name: str

        def wait_stream(self, other):
            self.log.append(f"{self.name} waits for {other.name}")

    @dataclass
    class FakeEvent:
        log: list

        def record(self, stream):
            self.log.append(f"event on {stream.name}")

        def synchronize(self):
            self.log.append("wait for event")

        def elapsed_time(self, end):
            return 2.5


class Recording(CudaSideStream):
    """Also writes down the copies."""

    def run(self, copy):
        def noted():
            self._cuda.log.append("copy")
            copy()

        super().run(noted)


def test_host_copies_run_beside_the_computation_in_the_right_order():
    cuda = FakeCuda()
    pool = pool_of(num_host_blocks=3, side=Recording(CPU, cuda))
    fill(pool)
    old = pool.layers[0].k.clone()
    one = ["side waits for compute", "enter side", "event on side", "copy", "event on side"]
    one.append("leave side")
    pool.copy(copies((1, 0, 2, 0, 4), (2, 0, 0, 5, 4)))
    assert cuda.log == one * 2
    cuda.log.clear()
    # A copy inside the device runs with the computation, after what the side stream does; a copy to
    # the host behind it waits for it.
    pool.copy(copies((1, 0, 3, 1, 4), (0, 0, 1, 3, 4), (1, 0, 3, 2, 4)))
    assert cuda.log == [*one, "compute waits for side", *one]
    cuda.log.clear()
    pool.join()
    pool.join()
    assert cuda.log == ["compute waits for side"]
    assert pool.take_host_copies()() == pytest.approx(4 * 2.5e-3)
    assert cuda.log[1:] == ["wait for event"]
    assert pool.take_host_copies()() == 0.0
    assert torch.equal(pool.layers[0].k[5], old[2])
    assert torch.equal(pool.layers[0].host_k[1], old[3])
    assert torch.equal(pool.layers[0].host_k[2], old[1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("value_size", "extra"), [(8, 0), (5, 0), (8, 3), (5, 3)])
def test_scattered_and_partial_blocks_go_to_the_host_and_back(layout, value_size, extra):
    pool = pool_of(layout, value_size=value_size, extra=extra, num_blocks=12, num_host_blocks=8)
    fill(pool)
    before = [(cache.k.clone(), cache.v.clone()) for cache in pool.layers]
    blocks, host, tokens = [9, 2, 7, 4, 1], [3, 4, 5, 0, 6], [4, 4, 3, 4, 1]
    pool.copy(copies(*((1, 0, b, h, n) for b, h, n in zip(blocks, host, tokens, strict=True))))
    targets = [3, 10, 6, 8, 5]
    pool.copy(copies(*((2, 0, h, t, n) for h, t, n in zip(host, targets, tokens, strict=True))))
    for cache, pair in zip(pool.layers, before, strict=True):
        for part, old in zip((cache.k, cache.v), pair, strict=True):
            expected = old.clone()
            for block, target, count in zip(blocks, targets, tokens, strict=True):
                expected[target, :count] = old[block, :count]
            assert torch.equal(part, expected)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_8_bit_floats_are_copied_as_bytes(name):
    """On a GPU torch has no indexing for all of them."""
    pool = pool_of(dtype=getattr(torch, name), num_host_blocks=2)
    for cache in pool.layers:
        for part in (cache.k, cache.v):
            part[1] = torch.arange(64, dtype=torch.float32).view(4, 2, 8).to(part.dtype)

    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name().partition(".")[0]
            indexes = name in {"aten::index", "aten::index_put_", "aten::_index_put_impl_"}
            assert not indexes or args[0].dtype == torch.uint8
            return func(*args, **(kwargs or {}))

    with Refusing():
        pool.copy(copies((0, 0, 1, 2, 4), (1, 0, 2, 1, 4), (2, 0, 1, 5, 4)))
    for cache in pool.layers:
        for part in (cache.k, cache.v):
            for block in (2, 5):
                assert torch.equal(part[block].float(), part[1].float())


def test_poison_spares_the_null_block():
    pool = pool_of(poison=True, dtype=torch.bfloat16)
    for cache in pool.layers:
        assert not cache.k[0].any()
        assert cache.k[1:].isnan().all()
        assert cache.v[1:].isnan().all()


def test_fresh_memory_is_not_touched():
    before = reset_peak_resident()
    pool = pool_of(num_blocks=2**20)  # 1 GiB
    pool.layers[0].k[2**20 - 1, 3, 1, 7] = math.pi
    assert pool.layers[0].k[2**20 - 1, 3, 1].tolist()[6:] == [0.0, pytest.approx(math.pi)]
    assert peak_resident() - before < 2**26


def test_too_large_a_pool_is_a_capacity_error():
    with pytest.raises(CapacityError, match=r"KV pool of 1099511627776 blocks .* MiB"):
        pool_of(num_blocks=2**40)


def test_bytes_of_a_block():
    specs = [KVSpec(0, "full", 3, 8, 4), KVSpec(1, "full", 1, 2, 2)]
    plain, scaled = KVLayout(LAYOUTS[0]), KVLayout(LAYOUTS[0], ("int8",), extra=4)
    assert block_bytes(specs, [plain] * 2, 16, torch.float16) == (3 * 12 + 4) * 16 * 2
    assert block_bytes(specs, [scaled] * 2, 16, torch.int8) == (3 * 20 + 12) * 16


@pytest.mark.parametrize("value_size", [8, 5])
def test_what_a_layout_keeps_beside_the_values_is_copied_with_them(value_size):
    specs = [KVSpec(0, "full", 2, 8, value_size)]
    pool = KVPool(
        specs,
        [KVLayout(LAYOUTS[1], ("int8",), extra=4)],
        num_blocks=6,
        block_size=4,
        dtype=torch.int8,
        device=CPU,
        num_host_blocks=2,
        poison=True,
    )
    cache = pool.layers[0]
    assert cache.k.shape == (6, 4, 2, 12)
    assert cache.v.shape == (6, 4, 2, value_size + 4)
    assert not cache.k[0].any()
    assert cache.k[1, 0, 0, 8:].clone().view(torch.float32).isnan()
    cache.k[2] = torch.arange(96, dtype=torch.int8).view(4, 2, 12)
    pool.copy(copies((0, 0, 2, 3, 4), (1, 0, 2, 1, 4), (2, 0, 1, 5, 3)))
    assert torch.equal(cache.k[3], cache.k[2])
    assert torch.equal(cache.k[5, :3], cache.k[2, :3])


def test_the_first_layout_that_fits_is_taken():
    offered = [
        KVLayout(LAYOUTS[0], ("bfloat16",)),
        KVLayout(LAYOUTS[1], ("float32",), (32, 64)),
        KVLayout(LAYOUTS[2], ("float32",), (16,)),
    ]
    assert choose_layout(offered, torch.float32, 16) is offered[2]
    assert choose_layout(offered, torch.bfloat16, 16) is offered[0]
    with pytest.raises(
        ConfigError, match=r"a float16 KV cache in blocks of 16 tokens.*float32 in blocks of 32/64"
    ):
        choose_layout(offered, torch.float16, 16)


def test_the_backends_kernel_copies_where_it_can():
    calls = []

    def copier(pools, *columns):
        calls.append((len(pools), [column.tolist() for column in columns]))
        return len(calls) == 1

    pool = pool_of(num_groups=2, copiers={1: copier})
    fill(pool)
    expected = [cache.k.clone() for cache in pool.layers]
    pool.copy(copies((0, 1, 1, 3, 4), (0, 1, 2, 4, 3), (0, 1, 4, 5, 2), (0, 0, 1, 2, 4)))
    assert calls == [(2, [[1, 2], [3, 4], [4, 3]]), (2, [[4], [5], [2]])]
    # The first run was the copier's; the second one it did not do, and group 0 has none.
    expected[0][2] = expected[0][1]
    expected[1][5, :2] = expected[1][4, :2]
    for cache, k in zip(pool.layers, expected, strict=True):
        assert torch.equal(cache.k, k)
