"""Weight source `package`: weights that ship inside an installed Python package.

The package is found and never imported.
"""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from octavo.core.contracts import NoOptions
from octavo.core.contracts.weight_source import WeightSource, WeightSourceContext
from octavo.core.errors import ModelNotFound
from octavo.models.weight_sources.folder import Folder
from octavo.models.weight_sources.gguf_file import GGUFFile
from octavo.models.weight_sources.source_forms import PACKAGE_PREFIX


def package_source(options: NoOptions, context: WeightSourceContext) -> WeightSource:
    """The folder or .gguf file that `package:NAME[/FILE]` means, as a source of that form."""
    path = locate(context.source)
    inner = WeightSourceContext(
        source=str(path),
        revision=None,
        download_dir=None,
        cache_dir=context.cache_dir,
        show_progress=context.show_progress,
    )
    return Folder(options, inner) if path.is_dir() else GGUFFile(options, inner)


def locate(source: str) -> Path:
    """Path of a model's folder or .gguf file. Raises `ModelNotFound` for an absent package, a
    package without weights, and one with several of which none was named."""
    name, _, file = source.removeprefix(PACKAGE_PREFIX).partition("/")
    roots = _roots(name)
    if file:
        return _named(name, roots, file)
    found = sorted({path for root in roots for path in _candidates(root)})
    if not found:
        raise ModelNotFound(
            f"package '{name}' holds no .gguf file and no folder with config.json (in {roots[0]})"
        )
    if len(found) > 1:
        names = ", ".join(f"{PACKAGE_PREFIX}{name}/{_relative(path, roots)}" for path in found)
        raise ModelNotFound(f"package '{name}' holds several models, name one of them: {names}")
    return found[0]


def _roots(name: str) -> list[Path]:
    """Folders of a package. Only parents' search paths are used, so nothing is imported."""
    spec: ModuleSpec | None = None
    for part in name.split("."):
        if not part.isidentifier():
            hint = f"; did you mean '{part.replace('-', '_')}'?" if "-" in part else ""
            raise ModelNotFound(f"'{name}' is not the import name of a package{hint}")
        if spec is None:
            spec = None if part == "__main__" else importlib.util.find_spec(part)
        else:
            spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
        if spec is None:
            raise ModelNotFound(f"no Python package '{name}' is installed here")
        if spec.submodule_search_locations is None:
            raise ModelNotFound(f"'{name}' is a module, not a package, and holds no files")
    assert spec is not None, "a name has at least one part"
    return [Path(place) for place in spec.submodule_search_locations or ()]


def _named(name: str, roots: list[Path], file: str) -> Path:
    for root in roots:
        path = root / file
        inside = path.resolve().is_relative_to(root.resolve())
        if inside and (path.is_file() or (path.is_dir() and (path / "config.json").is_file())):
            return path
    raise ModelNotFound(
        f"package '{name}' holds no file '{file}' and no folder '{file}' with config.json"
        f" (in {roots[0]})"
    )


def _candidates(root: Path) -> list[Path]:
    files = [path for path in root.rglob("*.gguf") if path.is_file()]
    return files + [path.parent for path in root.rglob("config.json") if path.is_file()]


def _relative(path: Path, roots: list[Path]) -> str:
    for root in roots:
        if path != root and path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return "."
