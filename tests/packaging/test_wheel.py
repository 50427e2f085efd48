"""The wheel, built from the sdist: its files, its installation, its imports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PACKAGE_FOLDERS = (
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
OPTIONAL_PACKAGES = ("triton", "flashinfer", "xgrammar", "ray")

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys
import octavo
names, missing = ["octavo"], []
for info in pkgutil.walk_packages(octavo.__path__, "octavo.", onerror=lambda name: None):
    try:
        if not info.name.endswith(".__main__"):  # these run a command
            importlib.import_module(info.name)
    except ModuleNotFoundError as error:
        missing.append([info.name, error.name])
    names.append(info.name)
copies = [n for n in ("core", "kernels", "engine", "frontend", "testing",
                      "plugins", "backends", "models", "server", "bench",
                      "octavo.frontend.public") if n in sys.modules]
print(json.dumps({"names": names, "missing": missing, "copies": copies, "file": octavo.__file__}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd), "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources(repository: Path) -> list[str]:
    """Files of the checkout that git tracks or would offer to add."""
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run(
        *("git", "-c", f"safe.directory={repository}", "ls-files", "--cached", "--others"),
        "--exclude-standard",
        cwd=repository,
    )
    return [name for name in listed.splitlines() if (repository / name).is_file()]


@pytest.fixture(scope="module")
def wheel(repository: Path, sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`python -m build` makes the sdist from the sources and the wheel from the sdist."""
    pytest.importorskip("build", reason="the `dev` extra is not installed")
    tree = tmp_path_factory.mktemp("sources")
    for name in sources:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(repository / name, tree / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", "made", cwd=tree)
    assert len(list((tree / "made").glob("octavo-*.tar.gz"))) == 1
    (path,) = (tree / "made").glob("octavo-*.whl")
    return path


@pytest.fixture(scope="module")
def clean_venv(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A venv with the wheel, and what the installation added to its site-packages. Dependencies
    are those of this interpreter, by a .pth file."""
    folder = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    (site,) = (folder / "lib").glob("python*/site-packages")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *("--no-compile", "--disable-pip-version-check", wheel),
        cwd=folder,
    )
    gained = {entry.name for entry in site.iterdir()}
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "zz_dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python, gained


def test_wheel_has_every_tracked_file_of_the_packages(wheel: Path, sources: list[str]) -> None:
    expected = set()
    for name in sources:
        if name.startswith("frontend/public/"):
            expected.add("octavo/" + name.removeprefix("frontend/public/"))
        elif name.startswith(tuple(f"{folder}/" for folder in PACKAGE_FOLDERS)):
            expected.add("octavo/" + name)
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert "octavo/py.typed" in found
    assert found == expected


def test_wheel_has_the_live_page(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for ending in ("html", "css", "js"):
            assert archive.read(f"octavo/server/app/dashboard/page.{ending}")


def test_wheel_carries_the_licence(wheel: Path, repository: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/licenses/LICENSE"))
        assert archive.read(name) == (repository / "LICENSE").read_bytes()


def test_installation_adds_only_octavo(clean_venv: tuple[Path, set[str]]) -> None:
    python, gained = clean_venv
    assert "octavo" in gained
    assert [name for name in gained if not name.startswith("octavo")] == []
    assert (python.parent / "octavo").is_file()


def test_every_module_of_the_wheel_imports(
    clean_venv: tuple[Path, set[str]], wheel: Path, tmp_path: Path
) -> None:
    python, _ = clean_venv
    seen = json.loads(run(python, "-W", "error", "-c", IMPORT_EVERYTHING, cwd=tmp_path))
    assert Path(seen["file"]).is_relative_to(python.parent.parent)
    assert seen["copies"] == []
    assert [m for m in seen["missing"] if m[1].split(".")[0] not in OPTIONAL_PACKAGES] == []
    with zipfile.ZipFile(wheel) as archive:
        modules = {
            name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            for name in archive.namelist()
            if name.startswith("octavo/") and name.endswith(".py")
        }
    assert set(seen["names"]) == modules
