"""What the machine has: device and CPU threads."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from octavo.core.contracts import Platform
from octavo.core.errors import ConfigError
from octavo.engine import device


def cgroup(tmp_path, membership, files):
    root = tmp_path / "cgroup"
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    root.mkdir(exist_ok=True)
    (tmp_path / "membership").write_text(membership)
    return device.cgroup_cpus(root, tmp_path / "membership")


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000", "a/cpu.max": "200000 100000"}, 2.0),
        ("0::/outside\n", {"cpu.max": "300000 100000"}, 3.0),
        ("0::/\n", {}, None),
        ("0::/\n", {"cpu.max": "nonsense"}, None),
        (
            "4:cpu,cpuacct:/job\n3:memory:/job\n",
            {
                "cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"},
            None,
        ),
    ],
)
def test_cgroup_quota(tmp_path, membership, files, cores):
    assert cgroup(tmp_path, membership, files) == cores


def test_no_cgroup(tmp_path):
    assert device.cgroup_cpus(tmp_path, tmp_path / "none") is None


@pytest.mark.parametrize(
    ("affinity", "quota", "expected"),
    [
        (8, None, (8, "cores in the affinity mask")),
        (8, 2.5, (3, "cgroup limit of 2.5 cores")),
        (2, 4.0, (2, "cores in the affinity mask")),
        (8, 0.5, (1, "cgroup limit of 0.5 cores")),
    ],
)
def test_cpu_threads(monkeypatch, affinity, quota, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(affinity)), raising=False)
    monkeypatch.setattr(device, "cgroup_cpus", lambda: quota)
    assert device.cpu_threads() == expected


def test_platform_without_a_driver(monkeypatch):
    monkeypatch.setattr(device, "_has_driver", lambda: False)
    monkeypatch.setattr(device, "_ask_torch", lambda: (None, "torch finds no CUDA device"))
    assert device.detect_platform("cpu") == (Platform("cpu"), "set in the configuration")
    assert device.detect_platform("auto") == (Platform("cpu"), "no NVIDIA driver found")
    with pytest.raises(
        ConfigError,
        match=r"^executor\.device: cuda requested, but torch finds no CUDA device; set executor",
    ):
        device.detect_platform("cuda")


def test_platform_with_a_driver(monkeypatch):
    monkeypatch.setattr(device, "_has_driver", lambda: True)
    monkeypatch.setattr(device, "_ask_torch", lambda: (Platform("cuda", (9, 0)), None))
    assert device.detect_platform("auto") == (Platform("cuda", (9, 0)), "CUDA device found")
    monkeypatch.setattr(device, "_ask_torch", lambda: (None, "torch is built without CUDA"))
    assert device.detect_platform("auto") == (Platform("cpu"), "torch is built without CUDA")


@pytest.mark.parametrize(
    ("loaded", "given", "expected"),
    [
        (False, {}, "10000"),
        (False, {"GOMP_SPINCOUNT": "7"}, "7"),
        (False, {"OMP_WAIT_POLICY": "active"}, None),
        (True, {}, None),
    ],
)
def test_waiting_threads_sleep_soon(monkeypatch, loaded, given, expected):
    """Only where it still has an effect, and never against the user's own choice."""
    modules = {"torch": None} if loaded else {}
    monkeypatch.setattr(device, "sys", SimpleNamespace(modules=modules))
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "restored afterwards")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    device.limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
