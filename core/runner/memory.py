"""How much memory there is: of the process's cgroup and machine, and of a CUDA device."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60
"""A v1 limit above this means none."""


def free_host_memory() -> int:
    """Bytes that this process may still take: what its cgroup's limit leaves (page cache counts as
    free), and what the machine has available."""
    candidates = [_machine_available()]
    for limit, usage, statistics in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        bound = _read_number(_CGROUP / limit)
        if bound is None or bound > _UNLIMITED:
            continue
        used = _read_number(_CGROUP / usage) or 0
        candidates.append(bound - used + _reclaimable(_CGROUP / statistics))
    return max(0, min(candidates))


def peak_resident() -> int:
    """Largest resident size of this process since `reset_peak_resident`, in bytes."""
    status = _status("VmHWM")
    if status is not None:
        return status
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_resident() -> int:
    """Start a new peak where the system allows it, and return the resident size now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return peak_resident()
    return _status("VmRSS") or peak_resident()


def _status(field: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _machine_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 * GIB  # no /proc: a guess that keeps the pool within its usual bound


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(statistics: Path) -> int:
    """Page cache that the kernel drops first when the cgroup is full."""
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    for name in ("total_inactive_file", "inactive_file"):
        for line in lines:
            if line.startswith(name + " "):
                return int(line.split()[1])
    return 0
