"""Make build/typing/octavo, a tree of links laid out as the package is when installed.

mypy and IDEs do not follow setuptools' editable finder; they follow this tree. `make lint` uses it,
and `PYTHONPATH=build/typing` runs a checkout without installing it: beside the package lies what an
installer writes of its entry points, by which built-ins are found.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typing"
FOLDERS = (
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


def main() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "octavo"
    package.mkdir(parents=True)
    for folder in FOLDERS:
        if folder != "frontend":
            (package / folder).symlink_to(ROOT / folder, target_is_directory=True)
    (package / "frontend").mkdir()
    link_children(ROOT / "frontend", package / "frontend")
    link_children(ROOT / "frontend" / "public", package)
    write_metadata()


def link_children(folder: Path, target: Path) -> None:
    """Links to what is in a folder, but for `public`, which is the package `octavo` itself."""
    for item in folder.iterdir():
        if item.name not in ("public", "__pycache__"):
            (target / item.name).symlink_to(item)


def write_metadata() -> None:
    """Name, version and entry points of pyproject.toml, as `importlib.metadata` reads them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = TREE / f"{project['name']}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = []
    for group, points in groups.items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {target}" for name, target in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
