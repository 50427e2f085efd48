"""The kernel tests again, with a build that checks every memory access."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.backends.cpu import build

HERE = Path(__file__).parent


def _runtime(name: str) -> str:
    found = subprocess.run(
        [*build.toolchain().compiler, f"-print-file-name={name}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"the compiler has no {name}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["test_cpu_linear.py", "test_cpu_attention.py", "test_cpu_sampler.py"]
)
def test_no_access_out_of_bounds(name: str) -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{_runtime('libasan.so')} {_runtime('libubsan.so')}",
        # The interpreter and torch leave memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "OCTAVO_TEST_SANITIZED": "1",
    }
    command = [sys.executable, "-m", "pytest", str(HERE / name), "-sp", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", "not slow", "-k", "not compiled_whole"],
        env=environment,
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "passed" in done.stdout
