"""Where implementations come from, and how what they name is imported."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import PROJECT, Provider
from octavo.core.errors import PluginError, PluginImportError, nearest

E = TypeVar("E", bound=PluginError)


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from."""

    where: str
    """`entry point 'x'`, `module x`, `file ./my.py`, `class my.Policy`, ..."""
    distribution: str | None = None
    """Normalized name; None where no distribution brings the plugin."""
    version: str | None = None
    preferred: bool = False
    """Whether the user handed it over: it is chosen unless the configuration names another."""
    entry_point: str | None = None

    @property
    def built_in(self) -> bool:
        return self.distribution == PROJECT

    def __str__(self) -> str:
        if self.distribution is None:
            return self.where
        return f"{self.where} of distribution '{self.distribution}' {self.version}"


@dataclass(frozen=True)
class Failure:
    """A plugin that could not be loaded."""

    source: Source
    message: str
    """Why, in one line."""
    error: BaseException


@dataclass(frozen=True)
class Registered:
    """A provider that is known, with its kind and its source."""

    provider: Provider[Any]
    declared: Kind
    source: Source

    @property
    def kind(self) -> str:
        return self.declared.name

    @property
    def name(self) -> str:
        return self.provider.name

    @property
    def distribution(self) -> str | None:
        return self.source.distribution

    @property
    def version(self) -> str | None:
        return self.source.version

    @property
    def where(self) -> str:
        return self.source.where

    @property
    def label(self) -> str:
        """The name, with the distribution if it is a third party's."""
        if self.distribution is None or self.source.built_in:
            return self.name
        return f"{self.name} ({self.distribution} {self.version})"

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' ({self.source})"

    def error(self, error: type[E], message: str) -> E:
        """An exception about this provider, with the message as it is."""
        return error(message, kind=self.kind, name=self.name, distribution=self.distribution)

    def import_error(self, message: str) -> PluginImportError:
        """A `PluginImportError` that begins with the provider and its source."""
        return self.error(PluginImportError, f"{self}: {message}")


def normalized(name: str) -> str:
    """A distribution's or entry point's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def explain(exc: BaseException, module_name: str) -> str:
    """Why an import failed: the plugin itself is missing, or something that it needs."""
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        if module_name == exc.name or module_name.startswith(exc.name + "."):
            return f"module '{exc.name}' is not installed or not on the path"
        return f"its dependency '{exc.name}' is not installed"
    return f"{type(exc).__name__}: {exc}"


def import_string(text: str, what: str, error: Callable[[str], PluginError]) -> Any:
    """Import `"package.module:attribute"`.

    what: how messages call it ("factory"). error: makes the exception to raise, which tells a
    missing module, a missing dependency and a missing attribute apart.
    """
    name, _, attribute = text.partition(":")
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as exc:
        raise error(f"its {what} '{text}' cannot be imported: {explain(exc, name)}") from exc

    def missing(part: str, hint: str) -> PluginError:
        hint = f"; {hint}" if hint.startswith("did") else ""
        return error(f"its {what} '{text}': module '{name}' has no '{part}'{hint}")

    return _attribute(module, attribute, missing)


def load_named(text: str) -> tuple[Any, Source]:
    """Import an item of `plugins.load`: `module`, `module:Attr`, `./file.py` or
    `./file.py:Attr`. Raises `PluginImportError`."""
    match = re.fullmatch(r"(.+\.py)(?::([\w.]+))?", text)
    if match:
        module = _import_file(Path(match[1]).expanduser())
        attribute, source = match[2] or "", Source(f"file {match[1]}", preferred=True)
    else:
        name, _, attribute = text.partition(":")
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as exc:
            raise PluginImportError(
                f"plugins.load: '{text}' cannot be imported: {explain(exc, name)}"
            ) from exc
        source = Source(f"module {name}", preferred=bool(attribute))

    def missing(part: str, hint: str) -> PluginError:
        return PluginImportError(f"plugins.load: {source.where} has no '{part}'; {hint}")

    return _attribute(module, attribute, missing), source


def _attribute(module: ModuleType, path: str, error: Callable[[str, str], PluginError]) -> Any:
    """A dotted attribute of a module; the module itself for an empty path."""
    found: Any = module
    for part in filter(None, path.split(".")):
        if not hasattr(found, part):
            raise error(part, nearest(part, [n for n in vars(module) if not n.startswith("_")]))
        found = getattr(found, part)
    return found


def _import_file(path: Path) -> ModuleType:
    """Import a Python file under a name of its own; twice gives the same module."""
    digest = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    name = f"octavo_file_{re.sub(r'[^0-9a-zA-Z]', '_', path.stem)}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise PluginImportError(f"plugins.load: there is no file '{path}'")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginImportError(f"plugins.load: '{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as exc:
        del sys.modules[name]
        if not isinstance(exc, Exception | SystemExit):
            raise
        raise PluginImportError(
            f"plugins.load: file '{path}' cannot be imported: {explain(exc, name)}"
        ) from exc
    return module
