"""The public surface changes only with a version: docs/surface.json against the code."""

from __future__ import annotations

import copy
import json
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "tools" / "freeze_surface.py"))


@pytest.fixture
def frozen(repository: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((repository / "docs" / "surface.json").read_text())
    return found


def test_nothing_public_changed_without_a_version(tool: Any, frozen: Any) -> None:
    now = tool["surface"]()
    assert tool["problems"](frozen, now) == []
    assert now == frozen, "docs/surface.json is stale: run `make docs`"


def changed(frozen: dict[str, Any], version: str, **members: str) -> dict[str, Any]:
    """The surface with a sampler contract of another version and with other methods."""
    new = copy.deepcopy(frozen)
    sampler = new["contracts"]["sampler"]
    sampler["version"] = version
    sampler["classes"]["Sampler"].update(members)
    return new


@pytest.mark.parametrize(
    ("version", "members", "needed"),
    [
        ("1", {"sample": "(self, logits), abstract"}, "2.0"),
        ("1.1", {"sample": "(self, logits), abstract"}, "2.0"),
        ("2", {"sample": "(self, logits), abstract"}, None),
        ("1", {"sample": "(self, logits, batch)"}, "1.1"),
        ("1", {"flush": "(self)"}, "1.1"),
        ("1.1", {"flush": "(self)"}, None),
        ("1.1", {"flush": "(self), abstract"}, "2.0"),
    ],
)
def test_a_change_needs_its_version(
    tool: Any, frozen: Any, version: str, members: dict[str, str], needed: str | None
) -> None:
    frozen["contracts"]["sampler"]["version"] = "1"
    found = tool["problems"](frozen, changed(frozen, version, **members))
    if needed is None:
        assert found == []
    else:
        assert len(found) == 1
        assert f"raise it to {needed}" in found[0]


def test_what_is_gone_is_a_problem(tool: Any, frozen: Any) -> None:
    new = copy.deepcopy(frozen)
    del new["octavo"]["LLM"], new["contracts"]["sampler"], new["octavo.testing"]["SamplerSuite"]
    assert len(tool["problems"](frozen, new)) == 3
