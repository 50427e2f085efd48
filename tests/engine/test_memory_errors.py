"""Too little memory: what is needed, what there is, and the longest context that would fit."""

from __future__ import annotations

import msgspec
import pytest

from octavo.core.contracts.executor import DeviceMemory, WarmUp, WorkerReport
from octavo.core.contracts.model import KVSpec
from octavo.core.errors import CapacityError
from octavo.core.registry import Registry
from octavo.engine.builder import build_engine
from octavo.engine.capacity import breakdown, no_room, size
from octavo.engine.report import StartupReport
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config
from octavo.testing.instant_executor import InstantExecutor
from octavo.testing.model_folder import write_model_folder

GIB = 2**30
LENGTH = 256


def test_sizes_add_up():
    memory = DeviceMemory(80 * GIB, 0.9, 15 * GIB, 2 * GIB, GIB, GIB, 3 * GIB)
    assert memory.taken == 22 * GIB
    assert memory.pool == 50 * GIB
    assert breakdown(memory) == (
        "0.9 of 80.00 GiB are 72.00 GiB: 15.00 GiB for weights, 2.00 GiB for activations, 1.00 GiB "
        "for captured graphs, 1.00 GiB for the worker's buffers, 3.00 GiB for other processes and "
        "the driver"
    )
    assert DeviceMemory(80 * GIB, 0.5, 41 * GIB, 0).pool == 0
    memory = DeviceMemory(80 * GIB, 0.5, 10 * GIB, 0, tables=GIB)
    assert memory.pool == 29 * GIB
    assert "1.00 GiB for tables of logits processors" in breakdown(memory)


def test_what_helps_begins_with_the_largest_part():
    text = no_room(DeviceMemory(16 * GIB, 0.9, 4 * GIB, GIB, 0, 0, 10 * GIB), 2**20)
    assert text == (
        "no memory is left for the KV cache: 0.9 of 16.00 GiB are 14.40 GiB: 4.00 GiB for weights, "
        "1.00 GiB for activations, 10.00 GiB for other processes and the driver; 1 MiB are "
        "needed and 0 B available, 615 MiB too little, so that no context fits. What helps: ending "
        "other processes, model.quantization or model.dtype, scheduler.max_num_batched_tokens or "
        "scheduler.max_num_seqs, kv_cache.memory_utilization"
    )
    text = no_room(DeviceMemory(16 * GIB, 1.0, 16 * GIB, 0), 2**20)
    assert text.endswith("What helps: model.quantization or model.dtype")


class SmallDevice(InstantExecutor):
    """Blocks of 1000 bytes on a device with little left. warm: what its warm-up tells."""

    name = "small"
    memory: DeviceMemory | None = None
    budget = 5500
    warm: WarmUp | None = None
    allocated = False

    def start(self) -> WorkerReport:
        return WorkerReport(
            kv_specs=(KVSpec(0, "full", 1, 1, 1),),
            num_parameters=0,
            weight_bytes=0,
            activation_bytes=0,
            block_bytes=1000,
            kv_budget=self.budget if self.memory is None else self.memory.pool,
            vocab_size=285,
            dtype="float32",
            graph_bytes=0 if self.memory is None else self.memory.graphs,
            memory=self.memory,
        )

    def allocate_kv(self, num_blocks, num_host_blocks=0):
        type(self).allocated = True
        return self.warm


@pytest.fixture
def start(tmp_path):
    """start(memory=, budget=, warm=, **sections): the startup report of an engine."""
    folder = write_model_folder(tmp_path / "model", LENGTH)

    def run(memory=None, budget=5500, warm=None, **sections):
        facts = {"memory": memory, "budget": budget, "warm": warm, "allocated": False}
        executor = type("Small", (SmallDevice,), facts)
        run.executor = executor
        model = {"source": str(folder), "weight_source": "dummy", **sections.pop("model", {})}
        kv = {"block_size": 16, **sections.pop("kv_cache", {})}
        mapping = {"model": model, "kv_cache": kv, "executor": {"kind": "small"}, **sections}
        registry = Registry.discover(objects=[executor])
        engine = build_engine(resolve(load_config(mapping=mapping), registry), registry)
        engine.close()
        return engine.report

    return run


def test_a_length_that_was_asked_for_and_does_not_fit(start):
    with pytest.raises(CapacityError) as caught:
        start(model={"max_model_len": 200})
    assert str(caught.value) == (
        "model.max_model_len: one sequence of 200 tokens needs 13 KiB of KV cache and 5 KiB are "
        "available; the longest context that fits is 80 tokens. Lower model.max_model_len to that, "
        "or leave it out to be served what fits; or raise kv_cache.memory_bytes, or make a token "
        "smaller by kv_cache.dtype"
    )
    assert not start.executor.allocated
    assert start(model={"max_model_len": 80}).max_sequence_tokens == 80
    with pytest.raises(CapacityError, match="longest context that fits is 48 tokens"):
        start(model={"max_model_len": 200}, kv_cache={"memory_bytes": 3500})


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("kv_cache.memory_bytes", {"kv_cache": {"memory_bytes": 2**40}}),
        ("kv_cache.host_cache_bytes", {"kv_cache": {"host_cache_bytes": 2**40}}),
        (
            "preemption.swap_space",
            {"preemption": {"policy": "swap", "swap_space": 2**40}},
        ),
    ],
)
def test_more_blocks_than_can_be_kept_in_mind(start, key, section):
    with pytest.raises(CapacityError) as caught:
        start(**section)
    assert str(caught.value) == (
        f"{key}: expected at most 67,108,864 KV blocks, got 1,099,511,627 of 1000 B each "
        "(1024.00 GiB)"
    )
    assert not start.executor.allocated


def test_on_a_device_the_sum_is_broken_down(start):
    memory = DeviceMemory(100_000, 0.5, 20_000, 10_000, 5_000, 1_000, 8_000)
    with pytest.raises(CapacityError) as caught:
        start(memory, model={"max_model_len": 200})
    text = str(caught.value)
    assert "longest context that fits is 96 tokens (0.5 of 98 KiB are 49 KiB: 20 KiB for w" in text
    assert "5 KiB for captured graphs" in text
    assert "raise kv_cache.memory_utilization, or make" in text


def test_the_models_own_length_is_a_note(start):
    report = start()
    assert report.max_sequence_tokens == 80
    assert any("holds 80 tokens, fewer than max_model_len 256" in note for note in report.notes)


def test_a_number_of_blocks_is_the_users_choice(start):
    report = start(model={"max_model_len": 200}, kv_cache={"num_blocks": 3})
    assert report.max_sequence_tokens == 48
    assert any("fewer than max_model_len 200" in note for note in report.notes)


def test_nothing_is_left(start):
    memory = DeviceMemory(100_000, 0.9, 80_000, 9_500, 0, 0, 200)
    with pytest.raises(CapacityError) as caught:
        start(memory)
    assert str(caught.value) == no_room(memory, 1000)
    with pytest.raises(CapacityError, match=r"at least 1 blocks of 1000 B, got 0 \(900 B are"):
        start(budget=900)
    with pytest.raises(CapacityError, match=r"got 0 \(900 B are available\)"):
        start(kv_cache={"memory_bytes": 900})


def test_graphs_and_phases_are_in_the_report(start):
    memory = DeviceMemory(2**30, 0.9, 0, 0, 3 * 2**20)
    warm = WarmUp({"capture": 1.25}, 7, 2 * 2**20, ("a capture failed",))
    report = start(memory, warm=warm)
    text = "\n".join(report.lines())
    assert "graphs     7 captured, 2 MiB (estimated 3 MiB)" in text
    assert f"memory     {breakdown(memory)}" in text
    assert "capture 1.25 s" in text
    assert "note       a capture failed" in text
    assert {"kv cache", "capture"} <= report.phases.keys()
    assert report.as_dict()["graph_bytes_estimated"] == 3 * 2**20
    assert report.as_dict()["memory"]["graphs"] == 3 * 2**20
    sent = msgspec.msgpack.encode(report)  # to the command that started the engine
    assert msgspec.msgpack.decode(sent, type=StartupReport) == report
    quiet = start()
    assert not any(line.startswith(("graphs", "memory")) for line in quiet.lines())
    assert report.kv_bytes <= memory.pool


def test_pools_of_a_device_that_is_shared(start):
    """What others hold, and what graphs will take, is not given to the pool."""
    assert start(DeviceMemory(100_000, 0.9, 20_000, 10_000)).num_blocks == 60
    shared = start(DeviceMemory(100_000, 0.9, 20_000, 10_000, 5_000, 0, 40_000))
    assert shared.num_blocks == 15
    assert shared.pool_reason == f"what {size(15_000)} of memory hold"
