"""Whether an implementation can be used here: requirements first, then its own probe."""

from __future__ import annotations

import importlib.util

from octavo.core.contract_checks import version_problem
from octavo.core.contracts import KINDS, Availability, ProbeContext, Requirement
from octavo.core.errors import PluginImportError
from octavo.core.plugin_loading import Registered, import_string


def availability(entry: Registered, ctx: ProbeContext) -> Availability:
    """Whether an implementation can be used here, and why not. Never raises."""
    problem = version_problem(entry, KINDS[entry.kind])
    if problem:
        return Availability(False, problem)
    for requirement in entry.provider.requires:
        missing = _missing(requirement, ctx)
        if missing:
            return Availability(False, missing)
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
        return Availability(
            False, f"its probe returned {type(answer).__name__}, expected Availability"
        )
    return answer


def _missing(requirement: Requirement, ctx: ProbeContext) -> str | None:
    """Which part of a requirement is not met."""
    if requirement.package and not _installed(requirement.package):
        extra = f" (pip install 'octavo[{requirement.extra}]')" if requirement.extra else ""
        return f"package '{requirement.package}' is not installed{extra}"
    if requirement.devices and ctx.platform.device not in requirement.devices:
        return f"needs device {' or '.join(requirement.devices)}, this is {ctx.platform.device}"
    if requirement.capability is not None:
        wanted = ".".join(map(str, requirement.capability))
        have = ctx.platform.capability
        if have is None:
            return f"needs CUDA compute capability {wanted}, this device has none"
        if have < requirement.capability:
            return f"needs CUDA compute capability {wanted}, this device has {have[0]}.{have[1]}"
    return None


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
