"""Providers for what a user hands over without one: classes, instances, modules of classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from octavo.core.contracts import NoOptions, Options, Provider
from octavo.core.contracts.kind import Kind
from octavo.core.errors import ContractError, PluginError, nearest
from octavo.core.registry.sources import Registered, Source

EXPECTED = "expected functions marked @octavo.hookimpl, or classes that inherit from a contract"


def registered(item: Any, source: Source, kinds: Mapping[str, Kind]) -> Iterable[Registered]:
    """Providers for a pair (kind, Provider) in either order, for a class or an instance of a
    contract, or for the classes of a contract in a module."""
    if isinstance(item, tuple):
        return [_pair(item, source, kinds)]
    if isinstance(item, ModuleType):
        classes = list(_classes(item, kinds))
        complete = [(cls, kind) for cls, kind in classes if not inspect.isabstract(cls)]
        if not complete:
            raise PluginError(f"{source}: offers nothing{_incomplete(classes)}; {EXPECTED}")
        return [Registered(_provider(cls, kind), kind, source) for cls, kind in complete]
    kind = _kind_of(item, kinds)
    if kind is None:
        raise PluginError(
            f"cannot use {item!r} as a plugin: expected a class or an instance of a contract "
            "(octavo.core.contracts), a module or object with hook implementations, or a pair "
            "(kind, Provider)"
        )
    return [Registered(_provider(item, kind), kind, source)]


def describe(item: Any) -> str:
    """How messages call an object that the user handed over."""
    if isinstance(item, ModuleType):
        return f"module {item.__name__}"
    if isinstance(item, tuple):
        names = [value.name for value in item if isinstance(value, Provider)]
        return f"provider {names[0]}" if names else "object"
    cls = item if isinstance(item, type) else type(item)
    return f"{'class' if isinstance(item, type) else 'object'} {cls.__module__}.{cls.__qualname__}"


def _pair(item: tuple[Any, ...], source: Source, kinds: Mapping[str, Kind]) -> Registered:
    names = [value for value in item if isinstance(value, str)]
    providers = [value for value in item if isinstance(value, Provider)]
    if len(item) != 2 or len(names) != 1 or len(providers) != 1:
        raise PluginError(f"cannot use {item!r} as a plugin: expected a pair (kind, Provider)")
    (name,), (provider,) = names, providers
    if name not in kinds:
        raise PluginError(f"there is no plugin kind '{name}'; {nearest(name, kinds)}")
    problem = provider.problem()
    if problem is not None:
        raise ContractError(f"{source}: provider {provider.name!r}: {problem}", kind=name)
    return Registered(provider, kinds[name], source)


def _classes(module: ModuleType, kinds: Mapping[str, Kind]) -> Iterator[tuple[type[Any], Kind]]:
    """The classes of a contract that a module, or a package's own modules, define."""
    for cls in dict.fromkeys(value for value in vars(module).values() if isinstance(value, type)):
        kind = _kind_of(cls, kinds)
        if kind is not None and f"{cls.__module__}.".startswith(f"{module.__name__}."):
            yield cls, kind


def _incomplete(classes: Iterable[tuple[type[Any], Kind]]) -> str:
    """What abstract classes lack, for a message."""
    lacking = [
        f"class {cls.__name__} lacks {', '.join(sorted(cls.__abstractmethods__))} of {kind.name}"
        for cls, kind in classes
    ]
    return f" that is complete: {'; '.join(lacking)}" if lacking else ""


def _kind_of(item: Any, kinds: Mapping[str, Kind]) -> Kind | None:
    cls = item if isinstance(item, type) else type(item)
    return next((kind for kind in kinds.values() if issubclass(cls, kind.contract)), None)


def _provider(item: Any, kind: Kind) -> Provider[Any]:
    """Its name is the attribute `name`, or the class's name in snake case; its options model the
    attribute `Options`."""
    cls = item if isinstance(item, type) else type(item)
    name = getattr(item, "name", None)
    if not isinstance(name, str) or not name:
        name = _snake_case(cls.__name__)
    options = getattr(cls, "Options", NoOptions)
    if not isinstance(options, type) or not issubclass(options, Options):
        raise ContractError(
            f"{describe(item)}: its attribute Options must be a class that inherits from "
            f"octavo.core.contracts.Options, got {options!r:.80}"
        )
    return Provider(
        name=name,
        factory=_factory(item) if isinstance(item, type) else (lambda options, context: item),
        options=options,
        contract_version=kind.version,
        summary=(inspect.getdoc(cls) or "").partition("\n")[0] if "__doc__" in vars(cls) else "",
    )


def _factory(cls: type[Any]) -> Callable[..., Any]:
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


def _snake_case(name: str) -> str:
    """`MyLRUPolicy` -> `my_lru_policy`."""
    text = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", text).lower()
