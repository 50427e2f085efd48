"""Whether an implementation keeps its contract, and whether it can be used here."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

from octavo.core.contracts import Availability, ProbeContext, Requirement
from octavo.core.errors import ContractError, PluginImportError
from octavo.core.registry.sources import Registered, import_string

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def version_problem(entry: Registered) -> str | None:
    """Why a provider's contract version does not go with ours; None if it does."""
    theirs, ours = entry.provider.contract_version, entry.declared.version
    if compatible(theirs, ours):
        return None
    return (
        f"{entry} was written for version {theirs!r} of its contract, "
        f"this Octavo has version {ours!r}"
    )


def compatible(theirs: str, ours: str) -> bool:
    """Version "0" is free to change, so it must be the very same. From "1" on the major number must
    be equal, and the minor at most ours: a minor change only adds."""
    if theirs == ours:
        return True
    try:
        (major, minor), (our_major, our_minor) = (
            [int(number or 0) for number in text.partition(".")[::2]] for text in (theirs, ours)
        )
    except ValueError:
        return False
    return major == our_major != 0 and minor <= our_minor


# ---- availability -------------------------------------------------------------------------------


def availability(entry: Registered, ctx: ProbeContext) -> Availability:
    """Whether an implementation can be used here: its contract's version, then its requirements,
    then its own probe. Never raises."""
    problem = version_problem(entry)
    for requirement in entry.provider.requires:
        problem = problem or _missing(requirement, ctx)
    if problem:
        return Availability(False, problem)
    probe = entry.provider.probe
    if probe is None:
        return Availability(True)
    try:
        if isinstance(probe, str):
            probe = import_string(probe, "probe", PluginImportError)
        answer = probe(ctx)
    except PluginImportError as exc:
        return Availability(False, str(exc))
    except (Exception, SystemExit) as exc:
        return Availability(False, f"its probe failed: {type(exc).__name__}: {exc}")
    if not isinstance(answer, Availability):
        got = type(answer).__name__
        return Availability(False, f"its probe returned {got}, expected Availability")
    return answer


def _missing(requirement: Requirement, ctx: ProbeContext) -> str | None:
    """Which part of a requirement is not met."""
    if requirement.package and not _installed(requirement.package):
        extra = f" (pip install 'octavo[{requirement.extra}]')" if requirement.extra else ""
        return f"package '{requirement.package}' is not installed{extra}"
    if requirement.devices and ctx.platform.device not in requirement.devices:
        return f"needs device {' or '.join(requirement.devices)}, this is {ctx.platform.device}"
    have = ctx.platform.capability
    if requirement.capability is not None and (have is None or have < requirement.capability):
        wanted = ".".join(map(str, requirement.capability))
        return f"needs CUDA compute capability {wanted}, this device has " + (
            "none" if have is None else f"{have[0]}.{have[1]}"
        )
    return None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


# ---- factories and classes ----------------------------------------------------------------------


def check_factory(factory: Any, entry: Registered) -> None:
    """Raise `ContractError` when a factory cannot be called as `factory(options, context)`."""
    if not callable(factory):
        raise _error(entry, f"its factory is {type(factory).__name__}, expected a callable")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise _error(
            entry,
            f"its factory {_name(factory)} has another signature: expected (options, context), "
            f"got {_plain(signature)}",
        ) from None


def check_class(cls: type[Any], entry: Registered) -> None:
    """Raise `ContractError` when a class does not keep the contract of its kind: it must inherit
    from it, implement every abstract method, and take what the contract's methods take."""
    contract = entry.declared.contract
    if not issubclass(cls, contract):
        raise _error(
            entry,
            f"class {_name(cls)} does not inherit from {_name(contract)}",
        )
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        shown = ", ".join(f"{name}{_shown_signature(cls, name)}" for name in missing)
        raise _error(entry, f"class {_name(cls)} does not implement {shown}")
    problems = list(_differences(cls, contract))
    if problems:
        raise _error(entry, "; ".join(problems))


def _differences(cls: type[Any], contract: type[Any]) -> Iterator[str]:
    """Methods that cannot be called as the contract says."""
    for base in cls.__mro__:
        if not issubclass(base, contract) or base.__module__ != contract.__module__:
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
    """Whether the calls that `expected` allows bind: by position and by name, with all arguments
    and with the required ones only."""
    kinds = inspect.Parameter
    by_name_too = all(p.kind is not kinds.VAR_POSITIONAL for p in actual.parameters.values())
    wanted = [p for p in expected.parameters.values() if p.kind not in _VARIADIC]
    required = [p for p in wanted if p.default is kinds.empty]
    in_order = [p.name for p in wanted if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    have = [p.name for p in actual.parameters.values() if p.kind is kinds.POSITIONAL_OR_KEYWORD]
    takes_any_name = any(p.kind is kinds.VAR_KEYWORD for p in actual.parameters.values())
    if not takes_any_name and any(a != b for a, b in zip(have, in_order, strict=False)):
        return False
    for given in (wanted, required):
        by_position = [p for p in given if p.kind is not kinds.KEYWORD_ONLY]
        by_name = {p.name: None for p in given if p.kind is kinds.KEYWORD_ONLY}
        try:
            actual.bind(*by_position, **by_name)
            if by_name_too:
                actual.bind(**{p.name: None for p in given})
        except TypeError:
            return False
    return True


def _shown_signature(cls: type[Any], name: str) -> str:
    signature = _signature(cls, name)
    return _plain(signature) if signature is not None else ""


def _plain(signature: inspect.Signature) -> str:
    """Without annotations, which differ in spelling only."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _name(item: Any) -> str:
    return str(getattr(item, "__qualname__", None) or type(item).__qualname__)


def _error(entry: Registered, message: str) -> ContractError:
    return entry.error(ContractError, f"{entry}: {message}")
