"""The tests for a GPU run on a CPU as far as it goes: what is wrong with a test is found here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

NOT_HERE = {
    "test_the_demo_model_has_the_tokens_of_transformers",  # tests/parity has it
    "test_a_capture_of_some_sizes",
    "test_graphs_take_what_was_estimated",  # tests/engine has the arithmetic
    "test_everything_stays_within_the_utilization",
    "test_nothing_is_left",
    "test_running_out_says_what_helps",
}


def rehearse(repository: Path, *args: str) -> tuple[dict[str, str], str]:
    """The table's row of each test function, and its last line."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--gpu-device", "cpu", *args],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *rows, last = done.stdout.partition("=" * 100)[2].strip().splitlines()
    return {row.split()[0]: " ".join(row.split()[1:]) for row in rows}, last


def functions(*files: Path) -> set[str]:
    return {name for f in files for name in re.findall(r"^def (test_\w+)", f.read_text(), re.M)}


def check(repository: Path, files: list[Path]) -> None:
    rows, last = rehearse(repository, *map(str, files))
    assert set(rows) == functions(*files)
    skipped = {name for name, row in rows.items() if "skipped" in row}
    assert skipped == NOT_HERE & set(rows)
    assert re.fullmatch(r"a CPU \(rehearsal\), torch \S+: \d+ passed(, \d+ skipped)?, \d+ s", last)


def modules(repository: Path, *names: str) -> list[Path]:
    return [repository / "tests" / "gpu" / f"test_gpu_{name}.py" for name in names]


def test_engines_for_a_gpu(repository: Path) -> None:
    check(repository, modules(repository, "demo", "engine", "families", "ahead", "memory"))


def test_kernels_for_a_gpu(repository: Path) -> None:
    check(repository, modules(repository, "kernels", "attention"))


def test_no_file_is_left_out(repository: Path) -> None:
    """And tests that begin after the time limit are skipped, which the table says."""
    every = sorted((repository / "tests" / "gpu").glob("test_*.py"))
    names = ("ahead", "attention", "demo", "engine", "families", "kernels", "memory")
    assert every == modules(repository, *names)
    rows, last = rehearse(repository, "tests/gpu", "--gpu-seconds", "0.001")
    assert set(rows) == functions(*every)
    assert all(row.startswith("1 skipped: the 0 s of --gpu-seconds") for row in rows.values())
    assert " passed" not in last
