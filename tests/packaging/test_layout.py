"""How folders become packages, and what importing Octavo must not do."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import setuptools

PACKAGE_FOLDERS = {
    "core": "octavo.core",
    "kernels": "octavo.kernels",
    "engine": "octavo.engine",
    "frontend": "octavo.frontend",
    "testing": "octavo.testing",
    "plugins": "octavo.plugins",
    "backends": "octavo.backends",
    "models": "octavo.models",
    "server": "octavo.server",
    "bench": "octavo.bench",
}


@pytest.fixture
def setup_arguments(repository: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What setup.py passes to setuptools."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", seen.update)
    monkeypatch.chdir(repository)
    runpy.run_path("setup.py")
    return seen


def test_every_folder_with_python_files_is_a_package(
    setup_arguments: dict[str, Any], repository: Path
) -> None:
    expected = {"octavo": "frontend/public"}
    for folder, name in PACKAGE_FOLDERS.items():
        for file in (repository / folder).rglob("*.py"):
            parts = file.parent.relative_to(repository / folder).parts
            if (folder, *parts) != ("frontend", "public"):
                expected[".".join((name, *parts))] = "/".join((folder, *parts))
    assert setup_arguments["package_dir"] == expected
    assert sorted(setup_arguments["packages"]) == sorted(expected)


def test_entry_points_name_modules_that_exist(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["octavo"]
    for target in project["entry-points"]["octavo"].values():
        top, folder = target.split(".")
        assert top == "octavo"
        assert (repository / folder / "__init__.py").is_file()


def test_tested_versions_lie_in_the_declared_ranges(repository: Path) -> None:
    requirements = pytest.importorskip("packaging.requirements")
    names = pytest.importorskip("packaging.utils")
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    pins = {}
    for line in (repository / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[names.canonicalize_name(name)] = version
    for text in project["dependencies"] + project["optional-dependencies"]["dev"]:
        requirement = requirements.Requirement(text)
        version = pins.get(names.canonicalize_name(requirement.name))
        assert version is not None, f"constraints.txt pins no version of {requirement.name}"
        assert version in requirement.specifier, f"{requirement} excludes the tested {version}"


def run_python(code: str) -> str:
    """Output of a fresh interpreter, outside the checkout's root so that `core` is no module."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=os.path.dirname(__file__),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "statement",
    [
        "import octavo",
        "from octavo import SamplingParams, Provider, hookimpl; SamplingParams(temperature=0)",
        "import octavo.core.contracts, octavo.core.messages, octavo.core.config.models",
        "import octavo.plugins, octavo.backends, octavo.models, octavo.server, octavo.bench",
    ],
)
def test_light_imports_do_not_bring_torch(statement: str) -> None:
    heavy = "{'torch', 'transformers'}"
    assert run_python(f"import sys; {statement}; print({heavy} & set(sys.modules))") == "set()\n"


def test_the_front_door_lists_what_it_gives() -> None:
    import octavo

    assert set(octavo.__all__) <= set(dir(octavo))
    assert (
        octavo.SamplingParams
        is __import__("octavo.core.sampling_params").core.sampling_params.SamplingParams
    )
    with pytest.raises(AttributeError, match="no attribute 'LLMM'"):
        octavo.LLMM  # noqa: B018


def test_nothing_is_imported_under_a_second_name() -> None:
    import octavo.core.contracts  # noqa: F401

    copies = {*PACKAGE_FOLDERS, "octavo.frontend.public"} & set(sys.modules)
    assert not copies
