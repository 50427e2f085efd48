"""Plugins made on the spot: modules and distributions in a folder that is put on the path."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class PluginFolder:
    """A folder on `sys.path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def module(self, name: str, source: str) -> Path:
        file = self.path / f"{name}.py"
        file.write_text(textwrap.dedent(source))
        return file

    def distribution(self, name: str, version: str, points: dict[str, str]) -> None:
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = [f"{point} = {module}" for point, module in points.items()]
        (info / "entry_points.txt").write_text("[octavo]\n" + "\n".join(lines) + "\n")

    def policy(self, distribution: str, name: str, body: str = "", version: str = "1.0") -> None:
        """A distribution that offers one scheduler policy under `name`."""
        module = distribution.replace("-", "_")
        self.module(module, POLICY.format(name=name, module=module) + textwrap.dedent(body))
        self.distribution(distribution, version, {distribution: module})


POLICY = """
from octavo.core.contracts import Provider, hookimpl
from octavo.core.contracts.scheduler_policy import SchedulerPolicy

PROVIDER = Provider(name="{name}", factory="{module}:Policy")

@hookimpl
def octavo_scheduler_policies():
    return [PROVIDER]

class Policy(SchedulerPolicy):
    def __init__(self, options, context):
        self.options, self.context = options, context
    def add(self, request): pass
    def remove(self, handle): return False
    def peek(self): return None
    def pop(self): raise IndexError
    def __len__(self): return 0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFolder]:
    path = tmp_path / "site"
    path.mkdir()
    before = set(sys.modules)
    monkeypatch.syspath_prepend(path)
    monkeypatch.delenv("OCTAVO_PLUGINS", raising=False)
    yield PluginFolder(path)
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def text() -> Callable[[BaseException], str]:
    """The message of an error on one line."""
    return lambda error: " ".join(str(error).split())
