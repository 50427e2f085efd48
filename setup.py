"""Maps the folders at the top of the repository to subpackages of `octavo`.

The list of packages is computed: a subpackage that is missing from it would import in an
editable install and be absent from the wheel.
"""

from pathlib import Path

from setuptools import setup

TOP = (
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
DATA = ("py.typed", "c", "cpp", "h", "html", "css", "js", "svg", "jinja", "yaml", "json")


def subpackages(folder: Path, name: str) -> dict[str, str]:
    """Every folder with an `__init__.py` below `folder`, as {package name: path}."""
    found = {name: folder.as_posix()}
    for child in sorted(p for p in folder.iterdir() if (p / "__init__.py").is_file()):
        if (folder.name, child.name) != ("frontend", "public"):
            found |= subpackages(child, f"{name}.{child.name}")
    return found


package_dir = {"octavo": "frontend/public"}
for top in TOP:
    package_dir |= subpackages(Path(top), f"octavo.{top}")

setup(
    packages=list(package_dir),
    package_dir=package_dir,
    package_data={"": [ending if "." in ending else f"*.{ending}" for ending in DATA]},
)
