"""How much memory there is: of the process's cgroup and machine, and of a CUDA device."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from pathlib import Path

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_UNLIMITED = 2**60
"""A v1 limit above this means none."""


def free_host_memory() -> int:
    """Bytes that this process may still take: what the limits of its cgroup and of those above it
    leave (page cache counts as free), and what the machine has available."""
    candidates = [_machine_available()]
    for folder, limit_name, usage_name in _cgroup_folders():
        limit = _read_number(folder / limit_name)
        if limit is not None and limit < _UNLIMITED:
            used = _read_number(folder / usage_name) or 0
            candidates.append(limit - used + _reclaimable(folder / "memory.stat"))
    return max(0, min(candidates))


def _cgroup_folders() -> Iterator[tuple[Path, str, str]]:
    """(folder, file of the limit, file of the usage) of this process's memory cgroups, innermost
    first. The outermost folders come even where /proc names none, as in a container."""
    v2 = (_CGROUP, "memory.max", "memory.current")
    v1 = (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit, usage = v1 if controllers else v2
        inner = root / path.strip("/")
        while inner != root:
            yield inner, limit, usage
            inner = inner.parent
    yield v2
    yield v1


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
