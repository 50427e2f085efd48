"""Memory of a CUDA device, with torch.cuda played by a device made of numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from octavo.core.errors import CapacityError
from octavo.engine.worker import profile
from octavo.engine.worker.kv_setup import kv_budget
from octavo.engine.worker.measure import measure
from octavo.engine.worker.out_of_memory import Phase, out_of_memory
from octavo.engine.worker.runner_setup import RunnerSettings

GIB = 2**30
CUDA = torch.device("cuda", 0)


class FakeCuda:
    """80 GiB, of which other processes hold `other`; this one has tensors of `allocated` bytes in
    `reserved`."""

    def __init__(self, monkeypatch, other=0, allocated=0, reserved=0):
        self.total, self.other = 80 * GIB, other
        self.allocated = self.peak = allocated
        self.reserved = reserved
        for name, function in {
            "mem_get_info": lambda device: (self.total - self.other - self.reserved, self.total),
            "memory_reserved": lambda device: self.reserved,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: self.reset(),
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def reset(self):
        self.peak = self.allocated

    def use(self, count):
        """A tensor that comes and goes."""
        self.peak = max(self.peak, self.allocated + count)


def settings(**changes):
    values = {
        "device": CUDA,
        "dtype": torch.bfloat16,
        "kv_dtype": torch.bfloat16,
        "block_size": 16,
        "max_num_seqs": 4,
        "max_model_len": 100,
        **changes,
    }
    return RunnerSettings(**values)


def test_the_peak_is_that_of_the_largest_batch(monkeypatch):
    cuda, passes = FakeCuda(monkeypatch, allocated=100), []

    def run(tokens):
        if not passes:
            cuda.allocated += 50  # a workspace, made at the first call and kept
            cuda.use(10**6)  # and what its making took
        passes.append(tokens)
        cuda.use(tokens * 3)

    found = profile.profile_cuda(run, 4000, CUDA)
    assert passes == [16, 4000]
    assert found.activation_bytes == 12_000
    assert found.step_token_limit is None


@pytest.mark.parametrize(("wanted", "largest"), [(20_000, 20_000), (50_000, 40_000), (None, 8192)])
def test_the_whole_budget_of_a_step_is_measured(monkeypatch, wanted, largest):
    FakeCuda(monkeypatch)
    made, passes = [], []
    runner = SimpleNamespace(compile=dict, estimate_bytes=int)
    measure(
        settings(max_num_batched_tokens=wanted, max_model_len=10_000),
        runner,
        {},
        set_pool=made.append,
        run=passes.append,
    )
    assert passes == [16, largest]
    assert made[0] * 16 >= largest


def test_the_budget_is_what_the_utilization_leaves(monkeypatch):
    FakeCuda(monkeypatch, other=5 * GIB, reserved=18 * GIB)
    memory = profile.kv_budget_cuda(CUDA, 0.9, 15 * GIB, 2 * GIB, GIB)
    assert (memory.weights, memory.buffers, memory.other) == (15 * GIB, 3 * GIB, 5 * GIB)
    assert memory.pool == 72 * GIB - (15 + 3 + 5 + 2 + 1) * GIB
    budget, shown = kv_budget(
        settings(memory_utilization=0.9), 1000, weights=15 * GIB, activations=2 * GIB, graphs=GIB
    )
    assert (budget, shown) == (memory.pool, memory)
    less, shown = kv_budget(
        settings(memory_utilization=0.9),
        1000,
        weights=15 * GIB,
        activations=2 * GIB,
        graphs=GIB,
        tables=GIB,
    )
    assert less == budget - GIB
    assert shown.tables == GIB


def test_nothing_is_counted_twice(monkeypatch):
    FakeCuda(monkeypatch, reserved=2 * GIB)
    memory = profile.kv_budget_cuda(CUDA, 0.5, 3 * GIB, 0, 0)  # some weights lie on the host
    assert (memory.weights, memory.buffers, memory.other) == (2 * GIB, 0, 0)
    assert memory.pool == 38 * GIB
    FakeCuda(monkeypatch, other=60 * GIB, reserved=GIB)
    assert profile.kv_budget_cuda(CUDA, 0.5, GIB, 0, 0).pool == 0


def test_a_cpu_has_its_own_rule():
    cpu = settings(device=torch.device("cpu"))
    budget, memory = kv_budget(cpu, 1000, weights=10**15, activations=0, graphs=0)
    assert (budget, memory) == ((4 * 7 + 1) * 1000, None)


def test_out_of_memory_on_a_device(monkeypatch):
    FakeCuda(monkeypatch, other=60 * GIB, reserved=19 * GIB)
    with (
        pytest.raises(CapacityError) as caught,
        out_of_memory(Phase.WEIGHTS, CUDA),
    ):
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 80 GiB"
        )
    assert str(caught.value) == (
        "out of memory while loading the weights: 2.50 GiB more were needed, and 1.00 GiB of 80.00 "
        "GiB are free on cuda:0, where this process holds 19.00 GiB and other processes and the "
        "driver 60.00 GiB. What helps: model.quantization, model.dtype, or a smaller model; "
        "`octavo plan MODEL` tells beforehand what a model needs"
    )
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_out_of_memory_of_this_machine():
    text = r"cache X: 32768\.00 GiB more were needed, and \S+ \S+ are free on this machine\. What"
    with (
        pytest.raises(CapacityError, match=text),
        out_of_memory(Phase.POOL, torch.device("cpu"), " X"),
    ):
        torch.empty(2**45, dtype=torch.uint8)


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError, match="shapes"), out_of_memory(Phase.STEP, CUDA):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "load_weights",
            r"out of memory while loading the weights: 1\.00 MiB more .* model\.dtype",
        ),
        ("graph_runner", r"while measuring a step of 64 tokens: .* scheduler\.max_num_batched_tok"),
    ],
)
def test_the_phases_of_a_start_say_what_helps(tiny_llama, where, message):
    runner = tiny_llama.runner()

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")

    if where == "load_weights":
        object.__setattr__(runner._factories, "load_weights", fail)
    else:
        make = runner._factories.graph_runner

        def broken(context):
            made = make(context)
            made.forward = fail
            return made

        object.__setattr__(runner._factories, "graph_runner", broken)
    with pytest.raises(CapacityError, match=message):
        runner.load()
