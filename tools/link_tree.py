"""Make build/typing/octavo, a tree of links laid out as the package is when installed.

mypy and IDEs do not follow setuptools' editable finder; they follow this tree. `make lint` uses it,
and `PYTHONPATH=build/typing` runs a checkout without installing it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "typing"
FOLDERS = ("core", "plugins", "backends", "models", "server", "bench")


def main() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    package = TREE / "octavo"
    package.mkdir(parents=True)
    for folder in FOLDERS:
        (package / folder).symlink_to(ROOT / folder, target_is_directory=True)
    for item in (ROOT / "core" / "public").iterdir():
        if item.name != "__pycache__":
            (package / item.name).symlink_to(item)


if __name__ == "__main__":
    main()
