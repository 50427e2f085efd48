"""`octavo.kernels` offers what docs/kernels.md says."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest

import octavo.kernels


@pytest.fixture
def page(repository: Path) -> str:
    return (repository / "docs" / "kernels.md").read_text()


def test_every_name_is_imported_when_it_is_used() -> None:
    assert dir(octavo.kernels) == sorted(octavo.kernels.__all__)
    for name in octavo.kernels.__all__:
        assert getattr(octavo.kernels, name) is not None
    with pytest.raises(AttributeError, match=r"'octavo\.kernels' has no attribute 'nothing'"):
        _ = octavo.kernels.nothing


def test_no_module_hides_a_name() -> None:
    """Importing a submodule sets an attribute of the package."""
    modules = {module.name for module in pkgutil.iter_modules(octavo.kernels.__path__)}
    assert not modules & set(octavo.kernels.__all__)


def test_annotations_see_the_same_names() -> None:
    tree = ast.parse(Path(str(octavo.kernels.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: str(node.module).removeprefix("octavo.kernels.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == octavo.kernels._WHERE
    assert set(imported) == set(octavo.kernels.__all__)


def test_the_page_describes_every_name(page: str) -> None:
    described = set(re.findall(r"\b\w+\b", " ".join(re.findall(r"`([^`\n]+)`", page))))
    assert not set(octavo.kernels.__all__) - described


def test_the_examples_run(page: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, "kernels.md", "exec"), {})
