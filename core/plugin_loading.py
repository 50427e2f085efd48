"""From entry points, names in YAML and objects to providers. Used by `octavo.core.registry` only.

A plugin is a module or an object with hook implementations. Classes and instances of a contract are
taken as well: their provider is made here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pluggy

from octavo.core import envvars
from octavo.core.contracts import KINDS, Kind, NoOptions, Options, Provider
from octavo.core.contracts.provider import PROJECT
from octavo.core.errors import (
    ContractError,
    PluginError,
    PluginImportError,
    nearest,
)

GROUP = "octavo"
BUILT_IN = "octavo"
EXPECTED = "expected functions marked @octavo.hookimpl, or classes that inherit from a contract"


E = TypeVar("E", bound=PluginError)


@dataclass(frozen=True)
class Source:
    """Where a plugin comes from. where: `entry point 'x'`, `file ./my.py`, `object Policy`, ...
    distribution, version: None for what no distribution brings. preferred: the user handed it over,
    so it is chosen unless the configuration names another."""

    where: str
    distribution: str | None = None
    version: str | None = None
    preferred: bool = False
    entry_point: str | None = None

    @property
    def built_in(self) -> bool:
        return self.distribution == BUILT_IN

    def __str__(self) -> str:
        if self.distribution is None:
            return self.where
        return f"{self.where} of distribution '{self.distribution}' {self.version}"


@dataclass(frozen=True)
class Registered:
    """A provider that is known, and where it comes from."""

    provider: Provider[Any]
    kind: str
    source: Source

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
        """The name, with the distribution of a third party's."""
        if self.distribution is None or self.source.built_in:
            return self.name
        return f"{self.name} ({self.distribution} {self.version})"

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' ({self.source})"

    def error(self, error: type[E], message: str) -> E:
        """An exception about it; the message is taken as it is."""
        return error(message, kind=self.kind, name=self.name, distribution=self.distribution)


# ---- importing ----------------------------------------------------------------------------------


def import_string(text: str, what: str, error: Callable[[str], PluginError]) -> Any:
    """What `"package.module:attribute"` names.

    what: how messages call it ("factory"). error: makes the exception that is raised. Says whether
    the module itself is missing, one of its dependencies, or the attribute.
    """
    module_name, _, attribute = text.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as exc:
        raise error(f"its {what} '{text}' cannot be imported: {explain(exc, module_name)}") from exc
    if not attribute:
        return module
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = [name for name in vars(module) if not name.startswith("_")]
            hint = nearest(part, names)
            hint = f"; {hint}" if hint.startswith("did") else ""
            raise error(f"its {what} '{text}': module '{module_name}' has no '{part}'{hint}")
        found = getattr(found, part)
    return found


def import_error(entry: Registered) -> Callable[[str], PluginImportError]:
    """Makes a `PluginImportError` about an implementation."""

    def make(message: str) -> PluginImportError:
        return entry.error(PluginImportError, f"{entry}: {message}")

    return make


def explain(exc: BaseException, module_name: str) -> str:
    """Why an import failed: the plugin itself is missing, or something that it needs is."""
    if isinstance(exc, ModuleNotFoundError) and exc.name:
        if module_name == exc.name or module_name.startswith(exc.name + "."):
            return f"module '{exc.name}' is not installed or not on the path"
        return f"its dependency '{exc.name}' is not installed"
    return f"{type(exc).__name__}: {exc}"


def import_file(path: Path) -> ModuleType:
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


# ---- sources ------------------------------------------------------------------------------------


def normalized(name: str) -> str:
    """A distribution's name as indexes compare it; entry points are compared alike."""
    return re.sub(r"[-_.]+", "-", name).lower()


def find_entry_points() -> Iterator[tuple[EntryPoint, Source]]:
    """All entry points of the group, Octavo's own first, then by distribution and name."""
    found = []
    for point in entry_points(group=GROUP):
        dist = point.dist
        name = normalized(dist.name) if dist else None
        source = Source(
            f"entry point '{point.name}'",
            name,
            dist.version if dist else None,
            entry_point=point.name,
        )
        found.append((point, source))
    found.sort(key=lambda item: (not item[1].built_in, item[1].distribution or "", item[0].name))
    yield from found


def load_named(text: str) -> tuple[Any, Source]:
    """What an item of `plugins.load` names: `module`, `module:Attr`, `./file.py`,
    `./file.py:Attr`. Raises `PluginImportError`."""
    match = re.fullmatch(r"(.+\.py)(?::([\w.]+))?", text)
    if match:
        module: Any = import_file(Path(match[1]).expanduser())
        attribute, source = match[2], Source(f"file {match[1]}", preferred=True)
    else:
        name, _, attribute = text.partition(":")
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as exc:
            raise PluginImportError(
                f"plugins.load: '{text}' cannot be imported: {explain(exc, name)}"
            ) from exc
        source = Source(f"module {name}", preferred=bool(attribute))
    if not attribute:
        return module, source
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PluginImportError(
                f"plugins.load: {source.where} has no '{part}'; "
                f"{nearest(part, [n for n in vars(module) if not n.startswith('_')])}"
            )
        found = getattr(found, part)
    return found, source


# ---- from a plugin to providers -----------------------------------------------------------------


class Hooks:
    """The hook specs of every kind, and the plugins registered with them."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self._kinds: dict[str, Kind] = {kind.hook: kind for kind in KINDS.values()}
        for kind in KINDS.values():
            self.manager.add_hookspecs(kind.module.Spec)

    def implementations(self, plugin: Any) -> dict[str, Any]:
        """Hook implementations of a module or object, by hook name."""
        found = {}
        for name in dir(plugin):
            options = self.manager.parse_hookimpl_opts(plugin, name)
            if options is not None:
                found[options.get("specname") or name] = getattr(plugin, name)
        return found

    def register(self, plugin: Any, source: Source) -> list[Registered]:
        """Check a plugin's hooks, register it, call its hooks. Raises `ContractError` for a hook
        that is unknown, has another signature or returns something else than providers, and
        `PluginImportError` when a hook raises."""
        implementations = self.implementations(plugin)
        for hook, function in implementations.items():
            self._check(hook, function, source)
        if not self.manager.is_registered(plugin):
            self.manager.register(plugin)
        found: list[Registered] = []
        for hook, function in implementations.items():
            trace = envvars.TRACE_HOOKS.get()
            if trace:
                print(f"octavo hook {hook}: calling {source}", file=sys.stderr)
            try:
                providers = function()
            except (Exception, SystemExit) as exc:
                raise PluginImportError(
                    f"{source}: hook {hook} failed: {explain(exc, '')}",
                    distribution=source.distribution,
                ) from exc
            offered = list(self._providers(hook, providers, source))
            found += offered
            if trace:
                names = ", ".join(entry.name for entry in offered)
                print(f"octavo hook {hook}: {source} offers {names or 'nothing'}", file=sys.stderr)
        return found

    def _check(self, hook: str, function: Any, source: Source) -> None:
        if hook not in self._kinds:
            raise ContractError(
                f"{source}: there is no hook '{hook}'; {nearest(hook, self._kinds)}",
                distribution=source.distribution,
            )
        actual = inspect.signature(function)
        if actual.parameters or inspect.isgeneratorfunction(function):
            generator = " as a generator" if inspect.isgeneratorfunction(function) else ""
            shown = f"({', '.join(map(str, actual.parameters.values()))})"
            raise ContractError(
                f"{source}: hook {hook} has another signature: expected {hook}(), "
                f"got {hook}{shown}{generator}",
                kind=self._kinds[hook].name,
                distribution=source.distribution,
            )

    def _providers(self, hook: str, providers: Any, source: Source) -> Iterator[Registered]:
        kind = self._kinds[hook]
        several = isinstance(providers, Iterable)
        for provider in providers if several else [providers]:
            if not isinstance(provider, Provider):
                held = f" that holds {provider!r:.80}" if several else ""
                raise ContractError(
                    f"{source}: hook {hook} returned {type(providers).__name__}{held}, "
                    "expected a list of Provider",
                    kind=kind.name,
                    distribution=source.distribution,
                )
            problem = provider.problem()
            if problem is not None:
                raise ContractError(
                    f"{source}: hook {hook} offers a provider {provider.name!r}: {problem}",
                    kind=kind.name,
                    distribution=source.distribution,
                )
            yield Registered(provider, kind.name, source)


def from_object(item: Any, source: Source, hooks: Hooks) -> list[Registered]:
    """Providers of whatever the user handed over: (kind, Provider) in either order, a class of a
    contract, an instance of one, or a module or object with hook implementations."""
    if isinstance(item, tuple):
        return [_pair(item, source)]
    if isinstance(item, ModuleType):
        found = hooks.register(item, source) or list(_classes_of(item, source))
        if not found:
            raise PluginError(f"{source}: offers nothing{_incomplete(item)}; {EXPECTED}")
        return found
    kind = kind_of(item)
    if kind is not None:
        return [Registered(provider_of(item), kind.name, source)]
    if not isinstance(item, type) and hooks.implementations(item):
        return hooks.register(item, source)
    raise PluginError(
        f"cannot use {item!r} as a plugin: expected a class or an instance of a contract "
        "(octavo.core.contracts), a module or object with hook implementations, or a pair "
        "(kind, Provider)"
    )


def describe(item: Any) -> str:
    """How messages call an object that the user handed over."""
    if isinstance(item, ModuleType):
        return f"module {item.__name__}"
    if isinstance(item, tuple):
        names = [part.name for part in item if isinstance(part, Provider)]
        return f"provider {names[0]}" if names else "object"
    cls = item if isinstance(item, type) else type(item)
    return f"{'class' if isinstance(item, type) else 'object'} {cls.__module__}.{cls.__qualname__}"


def _pair(item: tuple[Any, ...], source: Source) -> Registered:
    names = [part for part in item if isinstance(part, str)]
    providers = [part for part in item if isinstance(part, Provider)]
    if len(item) != 2 or len(names) != 1 or len(providers) != 1:
        raise PluginError(f"cannot use {item!r} as a plugin: expected a pair (kind, Provider)")
    if names[0] not in KINDS:
        raise PluginError(f"there is no plugin kind '{names[0]}'; {nearest(names[0], KINDS)}")
    problem = providers[0].problem()
    if problem is not None:
        raise ContractError(f"{source}: provider {providers[0].name!r}: {problem}", kind=names[0])
    return Registered(providers[0], names[0], source)


def _classes_of(module: ModuleType, source: Source) -> Iterator[Registered]:
    """Complete classes of a contract that a module, or a package's own modules, define."""
    for cls, kind in _contract_classes(module):
        if not inspect.isabstract(cls):
            yield Registered(provider_of(cls), kind.name, source)


def _contract_classes(module: ModuleType) -> Iterator[tuple[Any, Kind]]:
    """The classes of a contract that are a module's own; a package may bring those of its modules
    to its top."""
    classes = dict.fromkeys(value for value in vars(module).values() if isinstance(value, type))
    for cls in classes:
        kind = kind_of(cls)
        if kind is not None and f"{cls.__module__}.".startswith(f"{module.__name__}."):
            yield cls, kind


def _incomplete(module: ModuleType) -> str:
    """Which classes of a module lack what their contract asks for, for a message."""
    lacking = [
        f"class {cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))} of {kind.name}"
        for cls, kind in _contract_classes(module)
        if inspect.isabstract(cls)
    ]
    return f" that is complete: {'; '.join(lacking)}" if lacking else ""


def kind_of(item: Any) -> Kind | None:
    """The kind whose contract a class inherits from, or an instance is of."""
    cls = item if isinstance(item, type) else type(item)
    return next((kind for kind in KINDS.values() if issubclass(cls, kind.contract)), None)


def provider_of(item: Any) -> Provider[Any]:
    """A provider made on the spot for a class or an instance of a contract. Its name is the
    attribute `name`, or the class's name in snake case; its options model the attribute
    `Options`."""
    cls = item if isinstance(item, type) else type(item)
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not name:
        name = snake_case(cls.__name__)
    factory: Callable[..., Any] = (
        _class_factory(item) if isinstance(item, type) else (lambda options, context: item)
    )
    options = getattr(cls, "Options", NoOptions)
    if not isinstance(options, type) or not issubclass(options, Options):
        raise ContractError(
            f"{describe(item)}: its attribute Options must be a class that inherits from "
            f"octavo.core.contracts.Options, got {options!r:.80}"
        )
    summary = (inspect.getdoc(cls) or "").partition("\n")[0] if "__doc__" in vars(cls) else ""
    kind = kind_of(item)
    return Provider(
        name=name,
        factory=factory,
        options=options,
        contract_version=kind.version if kind else "1",
        summary=summary,
    )


def _class_factory(cls: type[Any]) -> Callable[..., Any]:
    """`cls(options, context)`, `cls(context)` or `cls()`: by the names of its arguments where these
    are `options` and `context`, else by how many it requires."""
    parameters = list(inspect.signature(cls).parameters.values())
    named = [p.name for p in parameters if p.name in ("options", "context")]
    required = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    swapped = [p.name for p in parameters[:2]] == ["context", "options"]
    by_place = len(required) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if by_place and not swapped:
        return cls
    if named:
        return lambda options, context: cls(
            **{name: options if name == "options" else context for name in named}
        )
    if required:
        return lambda options, context: cls(context)
    return lambda options, context: cls()


def snake_case(name: str) -> str:
    """`MyLRUPolicy` -> `my_lru_policy`."""
    text = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()
