"""Tests that need a CUDA device: `make gpu-test`. They end with a short table."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

_results: dict[str, Counter] = defaultdict(Counter)


def _device():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def pytest_collection_modifyitems(items):
    mine = [item for item in items if item.path.parent.name == "gpu"]
    if not mine:
        return
    missing = _device() is None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if missing:
            item.add_marker(pytest.mark.skip(reason="no CUDA device is here"))


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


def pytest_runtest_logreport(report):
    if "/gpu/" not in report.nodeid or (report.when != "call" and report.outcome == "passed"):
        return
    name = report.nodeid.rpartition("::")[2].partition("[")[0]
    _results[name][report.outcome] += 1


def pytest_terminal_summary(terminalreporter):
    device = _device()
    if not _results or device is None:
        return
    terminalreporter.section(f"on {device}")
    for name, counts in sorted(_results.items()):
        shown = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.line(f"{name:<64} {shown}")
