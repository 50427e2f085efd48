"""Runs the conformance suites of all that a distribution registers: `octavo plugins check`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import Any

from octavo.core.contracts import ProbeContext
from octavo.core.errors import PluginError, nearest
from octavo.core.registry import Registered, Registry
from octavo.core.registry.checks import availability
from octavo.core.registry.options import options_model
from octavo.core.registry.sources import normalized
from octavo.testing.conformance import SUITES, suite_of
from octavo.testing.conformance.base import ConformanceSuite, Verdict, run_suite

GROUP = "octavo.conformance"
"""Entry points of modules with suites: a package brings its own where the defaults do not fit."""


@dataclass(frozen=True)
class Checked:
    """One implementation. skipped: why nothing was run, empty when something was."""

    entry: Registered
    suite: str
    verdicts: tuple[Verdict, ...] = ()
    skipped: str = ""

    @property
    def kept(self) -> bool:
        """Whether no promise is broken."""
        return all(self.verdicts)


def check_distribution(
    name: str,
    registry: Registry,
    context: ProbeContext | None = None,
    progress: Callable[[Registered, Verdict], None] | None = None,
) -> list[Checked]:
    """Check every implementation that a distribution registers.

    Raises `PluginError` when it is not installed, registers nothing, or cannot be imported.
    """
    entries = _entries(name, registry)
    own = dict(_own_suites(name))
    found = []
    for entry in entries:
        suite = own.get((entry.kind, entry.name))
        skipped = _unavailable(entry, context or ProbeContext())
        if suite is None and not skipped:
            suite, skipped = _default_suite(entry)
        if suite is None or skipped:
            found.append(Checked(entry, suite.__name__ if suite else "", skipped=skipped))
            continue
        tell = partial(progress, entry) if progress else None
        found.append(Checked(entry, suite.__name__, tuple(run_suite(suite, tell))))
    return found


def _entries(name: str, registry: Registry) -> list[Registered]:
    wanted = normalized(name)
    found = [
        entry
        for kind in registry.kinds
        for entry in registry.entries(kind)
        if entry.distribution is not None and normalized(entry.distribution) == wanted
    ]
    if found:
        return found
    failed = [f for f in registry.failures if normalized(f.source.distribution or "") == wanted]
    if failed:
        raise PluginError(f"'{name}' is not used: {failed[0].message}", distribution=name)
    known = {e.distribution for k in registry.kinds for e in registry.entries(k) if e.distribution}
    try:
        distribution(name)
    except PackageNotFoundError:
        raise PluginError(
            f"no distribution '{name}' is installed; {nearest(name, sorted(known))}"
        ) from None
    raise PluginError(
        f"'{name}' is installed but registers no implementation: expected an entry point of the "
        "group 'octavo' in its pyproject.toml",
        distribution=name,
    )


def _own_suites(name: str) -> Iterator[tuple[tuple[str, str], type[ConformanceSuite]]]:
    """Suites that the distribution brings, by (kind, name of the provider)."""
    for point in entry_points(group=GROUP):
        if point.dist is None or normalized(point.dist.name) != normalized(name):
            continue
        try:
            module = point.load()
        except Exception as error:
            raise PluginError(
                f"the suites of '{name}' ({point.value}) cannot be imported: {error!r}",
                distribution=name,
            ) from error
        for _, suite in inspect.getmembers(module, inspect.isclass):
            if not issubclass(suite, ConformanceSuite):
                continue
            provider = suite.entry.provider if suite.entry is not None else suite.provider
            if provider is not None:
                yield (suite.kind, provider.name), suite


def _unavailable(entry: Registered, context: ProbeContext) -> str:
    answer = availability(entry, context)
    return "" if answer else answer.reason


def _default_suite(entry: Registered) -> tuple[type[ConformanceSuite] | None, str]:
    """The suite of the kind as it is, or why it cannot be run."""
    if entry.kind not in SUITES:
        return None, f"there is no suite for {entry.kind}"
    needed = [n for n, field in options_model(entry).model_fields.items() if field.is_required()]
    if needed:
        return None, f"it needs options ({', '.join(needed)}), and the package brings no suite"
    attributes: dict[str, Any] = {"entry": entry}
    return type(SUITES[entry.kind], (suite_of(entry.kind),), attributes), ""
