"""Deprecations are announced in one way, and only there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.core.deprecation import Deprecation, OctavoDeprecationWarning, warn

OLD = Deprecation("octavo.old()", "1.2", "1.4", "octavo.new()")


def old() -> None:
    warn(OLD)


def test_a_warning_says_when_and_what_instead_and_points_at_the_caller() -> None:
    with pytest.warns(OctavoDeprecationWarning, match=r"since Octavo 1\.2 .* in 1\.4: use") as seen:
        old()
    assert Path(seen[0].filename) == Path(__file__)


def test_no_other_module_warns_of_deprecations(repository: Path) -> None:
    folders = (
        "core",
        "kernels",
        "engine",
        "frontend",
        "testing",
        "plugins",
        "backends",
        "models",
        "server",
        "bench",
    )
    found = [
        str(path.relative_to(repository))
        for folder in folders
        for path in (repository / folder).rglob("*.py")
        if re.search(r"DeprecationWarning", path.read_text())
    ]
    assert [path for path in found if path != "core/deprecation.py"] == []
