"""Whether an implementation keeps its contract: version, base class, methods, signatures."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from octavo.core.contracts import Kind
from octavo.core.errors import ContractError
from octavo.core.plugin_loading import Registered


def version_problem(registered: Registered, kind: Kind) -> str | None:
    """Why a provider's contract version does not go with ours; None when it does.

    Version "0" is free to change, so it must be the very same. From "1" on the major number must be
    equal, and the minor at most ours: a minor change only adds.
    """
    theirs, ours = registered.provider.contract_version, kind.version
    if theirs == ours or _compatible(theirs, ours):
        return None
    return (
        f"{registered} was written for version {theirs!r} of its contract, "
        f"this Octavo has version {ours!r}"
    )


def _compatible(theirs: str, ours: str) -> bool:
    try:
        their_major, _, their_minor = theirs.partition(".")
        our_major, _, our_minor = ours.partition(".")
        return int(their_major) == int(our_major) != 0 and int(their_minor or 0) <= int(
            our_minor or 0
        )
    except ValueError:
        return False


def check_factory(factory: Any, registered: Registered) -> None:
    """Raise `ContractError` when a factory cannot be called as `factory(options, context)`."""
    if not callable(factory):
        raise _error(registered, f"its factory is {type(factory).__name__}, expected a callable")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise _error(
            registered,
            f"its factory {_name(factory)} has another signature: expected (options, context), "
            f"got {_plain(signature)}",
        ) from None


def check_class(cls: type[Any], kind: Kind, registered: Registered) -> None:
    """Raise `ContractError` when a class does not keep the contract of its kind: it must inherit
    from it, implement every abstract method, and take what the contract's methods take."""
    if not issubclass(cls, kind.contract):
        raise _error(
            registered,
            f"class {_name(cls)} does not inherit from {_name(kind.contract)}",
        )
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        shown = ", ".join(f"{name}{_shown_signature(cls, name)}" for name in missing)
        raise _error(registered, f"class {_name(cls)} does not implement {shown}")
    problems = list(_differences(cls, kind.contract))
    if problems:
        raise _error(registered, "; ".join(problems))


def _differences(cls: type[Any], contract: type[Any]) -> Iterator[str]:
    """Methods that cannot be called as the contract says."""
    for base in cls.__mro__:
        if not issubclass(base, contract) or not base.__module__.startswith("octavo.core."):
            continue
        for name, declared in vars(base).items():
            if (name.startswith("_") and name != "__len__") or not _is_method(declared):
                continue
            found = inspect.getattr_static(cls, name)
            if found is declared:
                continue
            if not _is_method(found):
                yield f"{_name(cls)}.{name} is {type(found).__name__}, expected a method"
                continue
            expected, actual = _signature(base, name), _signature(cls, name)
            if expected is None or actual is None or _accepts(actual, expected):
                continue
            yield (
                f"{_name(cls)}.{name} has another signature: expected {_plain(expected)}, "
                f"got {_plain(actual)}"
            )


def _is_method(value: Any) -> bool:
    return isinstance(value, staticmethod | classmethod) or callable(value)


def _signature(cls: type[Any], name: str) -> inspect.Signature | None:
    """Signature of a method without `self`."""
    static = inspect.getattr_static(cls, name)
    try:
        signature = inspect.signature(getattr(cls, name))
    except (TypeError, ValueError):
        return None
    if isinstance(static, staticmethod | classmethod):
        return signature
    parameters = list(signature.parameters.values())
    if parameters and parameters[0].kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        parameters = parameters[1:]
    return signature.replace(parameters=parameters)


def _accepts(actual: inspect.Signature, expected: inspect.Signature) -> bool:
    """Whether every call that `expected` allows is one that `actual` allows."""
    kinds = inspect.Parameter
    have = list(actual.parameters.values())
    has_args = any(p.kind is kinds.VAR_POSITIONAL for p in have)
    has_kwargs = any(p.kind is kinds.VAR_KEYWORD for p in have)
    by_position = [
        p for p in have if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    by_name = {
        p.name: p for p in have if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    }
    used: set[str] = set()
    position = 0
    for wanted in expected.parameters.values():
        if wanted.kind is kinds.POSITIONAL_OR_KEYWORD:
            if position < len(by_position):
                match = by_position[position]
                position += 1
                if match.name != wanted.name and not has_kwargs:
                    return False
            elif has_args:
                match = None
            else:
                return False
        elif wanted.kind is kinds.KEYWORD_ONLY:
            match = by_name.get(wanted.name)
            if match is None and not has_kwargs:
                return False
        else:
            continue
        if match is not None:
            used.add(match.name)
            if wanted.default is not kinds.empty and match.default is kinds.empty:
                return False
    return all(
        p.name in used or p.default is not kinds.empty
        for p in have
        if p.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    )


def _shown_signature(cls: type[Any], name: str) -> str:
    signature = _signature(cls, name)
    return _plain(signature) if signature is not None else ""


def _plain(signature: inspect.Signature) -> str:
    """Without annotations, which differ in spelling only."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _name(item: Any) -> str:
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)


def _error(registered: Registered, message: str) -> ContractError:
    return registered.error(ContractError, f"{registered}: {message}")
