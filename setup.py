"""Maps the folders at the top of the repository to subpackages of `octavo`.

The list of packages is computed: a subpackage that is missing from it would import in an
editable install and be absent from the wheel.
"""

from pathlib import Path

from setuptools import setup

TOP = {"core": "octavo.core"} | {
    name: f"octavo.{name}" for name in ("plugins", "backends", "models", "server", "bench")
}


def subpackages(folder: Path, name: str) -> dict[str, str]:
    """Every folder with an `__init__.py` below `folder`, as {package name: path}."""
    found = {name: folder.as_posix()}
    for child in sorted(p for p in folder.iterdir() if (p / "__init__.py").is_file()):
        if (folder.name, child.name) != ("core", "public"):
            found |= subpackages(child, f"{name}.{child.name}")
    return found


package_dir = {"octavo": "core/public"}
for folder, name in TOP.items():
    package_dir |= subpackages(Path(folder), name)

setup(
    packages=list(package_dir),
    package_dir=package_dir,
    package_data={"": ["py.typed", "*.c", "*.cpp", "*.h", "*.html", "*.css", "*.js", "*.svg", "*.jinja", "*.yaml", "*.json"]},
)
