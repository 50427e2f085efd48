"""A session of GPU tests says what it found, whatever becomes of the device."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TORCH = """
__version__ = "0"

def manual_seed(seed):
    pass

class cuda:
    lost = False
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda: "a device")

    @staticmethod
    def synchronize():
        if cuda.lost:
            raise RuntimeError("an illegal memory access\\nand what torch says of it")
"""
TESTS = """
import time
import pytest
import torch

def test_passes():
    pass

@pytest.mark.parametrize("case", ["one", "two"])
def test_breaks_the_device(case):
    torch.cuda.lost = case == "one"
    assert case == "two", "it is wrong"

def test_needs_the_device():
    assert not torch.cuda.lost

def test_never_ends():
    time.sleep(600)

def test_comes_last():
    pass
"""


def session(
    repository: Path, tmp_path: Path, *args: str, grace: float | None = None
) -> subprocess.Popen[str]:
    """grace: in place of `GRACE_S`, with eight seconds for everything."""
    folder = tmp_path / "gpu"
    folder.mkdir()
    for name in ("conftest.py", "outcome.py"):
        shutil.copy(repository / "tests" / "gpu" / name, folder)
    if grace is not None:
        with (folder / "outcome.py").open("a") as file:
            file.write(f"\nGRACE_S = {grace}\n")
        args = (*args, "--gpu-seconds", "8")
    (folder / "test_gpu_it.py").write_text(TESTS)
    (tmp_path / "torch.py").write_text(TORCH)
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "gpu", *args],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def table(text: str) -> list[list[str]]:
    """Its lines, in words."""
    return [line.split() for line in text.rpartition("=" * 100)[2].strip().splitlines()]


def test_the_rest_goes_on_after_a_lost_device_and_after_a_hang(
    repository: Path, tmp_path: Path
) -> None:
    with session(repository, tmp_path, "--gpu-test-seconds", "5") as running:
        text, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    assert "the device is lost (an illegal memory access): the other tests go on" in text
    assert "a test takes too long: the other tests go on" in text
    assert "in test_never_ends" in text  # where it hung
    *rows, last = table(text)
    assert [row for row in rows if row[0].startswith("test_")] == [
        ["test_passes", "1", "passed"],
        ["test_breaks_the_device", "1", "failed,", "1", "passed"],
        ["test_needs_the_device", "1", "passed"],
        ["test_never_ends", "1", "failed"],
        ["test_comes_last", "1", "passed"],
    ]
    assert rows[2][:5] == ["[one]", "AssertionError:", "it", "is", "wrong"]
    assert rows[5][:2] == ["ran", "for"]
    assert last[:-2] == ["a", "device,", "torch", "0:", "2", "failed,", "4", "passed,"]


def test_the_time_limit_ends_a_session_that_hangs(repository: Path, tmp_path: Path) -> None:
    """The test has begun in time; no other one begins."""
    with session(repository, tmp_path, "-k", "passes or ends or last", grace=0.0) as running:
        text, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    *rows, last = table(text)
    assert rows[0] == ["test_passes", "1", "passed"]
    assert rows[1] == ["test_never_ends", "1", "failed"]
    assert last[:-2] == ["a", "device,", "torch", "0:", "1", "failed,", "1", "passed,"]


def test_a_session_that_is_ended_tells_what_it_has(repository: Path, tmp_path: Path) -> None:
    with session(repository, tmp_path, "-vv", "-k", "passes or ends") as running:
        assert running.stdout is not None
        text = ""
        while "test_never_ends" not in text:
            read = running.stdout.read(1)
            assert read, text
            text += read
        running.send_signal(signal.SIGTERM)
        text += running.stdout.read()
    assert table(text)[0] == ["test_passes", "1", "passed"]
