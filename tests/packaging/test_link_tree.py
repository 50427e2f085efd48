"""A checkout runs without being installed: `python tools/link_tree.py`, then `PYTHONPATH`."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

SHOW = """
import importlib.metadata as metadata, importlib.util
print(metadata.version("octavo"), importlib.util.find_spec("octavo.core.errors").origin)
for point in sorted(metadata.entry_points(group="octavo"), key=lambda point: point.name):
    print(point.name, point.value, point.dist.name)
"""


def test_the_tree_has_the_package_and_its_entry_points(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = runpy.run_path(str(repository / "tools" / "link_tree.py"))
    monkeypatch.setitem(tool["main"].__globals__, "TREE", tmp_path / "tree")
    tool["main"]()
    tool["main"]()  # in the place of an old one
    done = subprocess.run(
        [sys.executable, "-S", "-c", SHOW],  # without what is installed
        env={**os.environ, "PYTHONPATH": str(tmp_path / "tree")},
        capture_output=True,
        text=True,
        check=True,
    )
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    first, *points = done.stdout.splitlines()
    origin = tmp_path / "tree" / "octavo" / "core" / "errors.py"
    assert first == f"{project['version']} {origin}"
    declared = project["entry-points"]["octavo"]
    assert points == [f"{name} {declared[name]} octavo" for name in sorted(declared)]
