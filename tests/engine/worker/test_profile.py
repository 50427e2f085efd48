"""Memory and speed as the runner finds them."""

from __future__ import annotations

import mmap

import pytest
import torch

from octavo.engine.worker import memory, profile


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A machine with 10^9 free bytes and no cgroup, until a test makes one."""
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(memory, "_machine_available", lambda: 10**9)
    return tmp_path


def test_cgroup_limits_bound_free_memory(cgroup):
    assert memory.free_host_memory() == 10**9
    (cgroup / "memory.max").write_text("max\n")
    assert memory.free_host_memory() == 10**9
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("700\n")
    (cgroup / "memory.stat").write_text("anon 400\ninactive_file 50\nfile 9\n")
    assert memory.free_host_memory() == 350
    (cgroup / "memory.current").write_text("2000\n")
    assert memory.free_host_memory() == 0


def test_limits_of_outer_cgroups_count(cgroup):
    (cgroup / "membership").write_text("0::/outer/inner\n")
    (cgroup / "outer" / "inner").mkdir(parents=True)
    (cgroup / "outer" / "inner" / "memory.max").write_text("max\n")
    assert memory.free_host_memory() == 10**9
    (cgroup / "outer" / "memory.max").write_text("900\n")
    (cgroup / "outer" / "memory.current").write_text("100\n")
    assert memory.free_host_memory() == 800
    (cgroup / "outer" / "inner" / "memory.max").write_text("500\n")
    assert memory.free_host_memory() == 500


def test_version_1_cgroups(cgroup):
    (cgroup / "membership").write_text("5:cpu:/elsewhere\n3:hugetlb,memory:/job\n")
    folder = cgroup / "memory"
    (folder / "job").mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    assert memory.free_host_memory() == 10**9
    (folder / "job" / "memory.limit_in_bytes").write_text("5000")
    (folder / "job" / "memory.usage_in_bytes").write_text("1000")
    (folder / "job" / "memory.stat").write_text("inactive_file 3\ntotal_inactive_file 500\n")
    assert memory.free_host_memory() == 4500


def test_peak_memory_is_seen():
    before = memory.reset_peak_resident()
    # A map of its own: the allocator may hand out pages that other tests have left resident.
    with mmap.mmap(-1, 32 * 2**20) as fresh:
        fresh.write(b"1" * len(fresh))
        assert memory.peak_resident() - before > 24 * 2**20


def test_the_cpu_pool_is_the_least_of_three(monkeypatch):
    monkeypatch.setattr(profile, "free_host_memory", lambda: 100 * profile.GIB)
    assert profile.kv_budget_cpu(2**50) == 4 * profile.GIB
    assert profile.kv_budget_cpu(1000) == 1000
    monkeypatch.setattr(profile, "free_host_memory", lambda: profile.GIB)
    assert profile.kv_budget_cpu(2**50) == profile.GIB // 4


class Machine:
    """Computes a token in a given time, by its own clock; the passes in `disturbed` take ten times
    as long."""

    def __init__(self, monkeypatch, seconds_a_token, disturbed=()):
        self.now, self.passes, self.cost = 0.0, [], seconds_a_token
        self.disturbed = disturbed
        monkeypatch.setattr(profile.time, "perf_counter", lambda: self.now)

    def run(self, tokens):
        slower = 10 if len(self.passes) in self.disturbed else 1
        self.passes.append(tokens)
        self.now += tokens * self.cost * slower


def test_step_token_limit(monkeypatch):
    machine = Machine(monkeypatch, 0.0027)
    assert profile.step_token_limit(machine.run, 8192) == 176
    assert machine.passes == [64, 64, 64]
    machine = Machine(monkeypatch, 0.0001)
    assert profile.step_token_limit(machine.run, 8192) == 4992
    assert machine.passes == [64, 128, 256, 512, 1024, 1024, 1024]
    assert profile.step_token_limit(Machine(monkeypatch, 1.0).run, 8192) == 64
    assert profile.step_token_limit(Machine(monkeypatch, 1e-9).run, 8192) == 8192
    machine = Machine(monkeypatch, 0.0001)
    assert profile.step_token_limit(machine.run, 100) == 4992
    assert max(machine.passes) == 100


@pytest.mark.parametrize("disturbed", [(0,), (1,), (4,), (5, 6), (0, 2, 4)])
def test_a_busy_machine_does_not_shrink_the_step(monkeypatch, disturbed):
    machine = Machine(monkeypatch, 0.0002, disturbed)
    assert profile.step_token_limit(machine.run, 8192) == 2496


def test_tied_weights_count_once():
    model = torch.nn.Module()
    model.a = torch.nn.Parameter(torch.zeros(3, 4))
    model.b = torch.nn.Linear(4, 3, bias=False)
    model.b.weight = model.a
    model.register_buffer("table", torch.zeros(5, dtype=torch.int8))
    assert profile.weight_size(model) == (12, 53)
