"""tests/COMPLAINTS.md names tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of the test functions of a file."""
    found = ast.walk(ast.parse(path.read_text()))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in found if isinstance(node, functions))


def test_every_line_names_a_test_that_exists(repository: Path) -> None:
    text = (repository / "tests" / "COMPLAINTS.md").read_text()
    items = re.findall(r"^- .*(?:\n  .*)*", text, re.M)
    assert len(items) > 40
    for item in items:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", item)
        assert named, f"no test is named: {item}"
        for path, name in named:
            assert name in functions_of(repository / "tests" / path), f"{path} has no {name}"
