"""Detects the device and the CPU threads that this process may use.

torch is imported only when a CUDA driver is present or CUDA is requested.
"""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from octavo.core.contracts import Platform
from octavo.core.errors import ConfigError

_SPINS = "10000"
"""Rounds of waiting before a thread sleeps. See docs/decisions/2026-11-29-cpu-kernels.md."""


def detect_platform(device: str) -> tuple[Platform, str]:
    """The platform for `executor.device`, and why. Raises `ConfigError` when `cuda` is requested
    and not available."""
    if device == "cpu":
        return Platform("cpu"), "set in the configuration"
    missing = None if device == "cuda" or _has_driver() else "no NVIDIA driver found"
    if missing is None:
        platform, missing = _ask_torch()
        if platform is not None:
            chosen = "set in the configuration" if device == "cuda" else "CUDA device found"
            return platform, chosen
    if device == "cuda":
        raise ConfigError(
            f"cuda requested, but {missing}; set executor.device: cpu to run without",
            path="executor.device",
        )
    return Platform("cpu"), str(missing)


def _has_driver() -> bool:
    """Whether an NVIDIA device node exists (Linux, or the one of WSL)."""
    dev = Path("/dev")
    return any(dev.glob("nvidia[0-9]*")) or (dev / "dxg").exists()


def _ask_torch() -> tuple[Platform | None, str | None]:
    if importlib.util.find_spec("torch") is None:
        return None, "torch is not installed"
    import torch

    if torch.version.cuda is None:
        return None, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return None, "torch finds no CUDA device"
    return Platform("cuda", torch.cuda.get_device_capability()), None


def cpu_threads() -> tuple[int, str]:
    """How many CPU threads to use, and why: what the affinity mask and the cgroup's quota allow."""
    if hasattr(os, "sched_getaffinity"):
        cores, why = len(os.sched_getaffinity(0)), "cores in the affinity mask"
    else:
        cores, why = os.cpu_count() or 1, "cores of this machine"
    quota = cgroup_cpus()
    if quota is not None and quota < cores:
        return max(1, math.ceil(quota)), f"cgroup limit of {quota:g} cores"
    return max(1, cores), why


def limit_spinning() -> None:
    """Let threads of OpenMP that wait for work sleep after a fraction of a millisecond: GNU's spin
    for milliseconds, on cores that other processes (the API's) or the thread that they wait for may
    need. Call it before torch is imported: the runtime reads its environment when it is loaded.
    Whoever has set `GOMP_SPINCOUNT` or `OMP_WAIT_POLICY` keeps it."""
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def cgroup_cpus(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Cores that the cgroup's quota allows (the least of it and its parents); None: no limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            found += _limits(root, path, _v2_limit)
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                found += _limits(root / name, path, _v1_limit)
    return min(found, default=None)


def _limits(root: Path, path: str, read: Callable[[Path], float | None]) -> list[float]:
    """Limits of a cgroup and of all above it. In a container the path may lead outside of what is
    mounted; then only the root is there."""
    folder = root / path.lstrip("/")
    found = []
    for here in (folder, *folder.parents):
        if here != root and root not in here.parents:
            break
        limit = read(here)
        if limit is not None:
            found.append(limit)
    return found


def _v2_limit(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _v1_limit(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 and period > 0 else None
    except (OSError, ValueError):
        return None
