"""How `auto` chooses among implementations, and why a name is not known."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.config.origin import Path, dotted
from octavo.core.contracts import Kind, ProbeContext
from octavo.core.errors import (
    PluginConflict,
    PluginError,
    PluginImportError,
    PluginNotFound,
    PluginUnavailable,
    nearest,
)
from octavo.core.registry.checks import availability
from octavo.core.registry.sources import Failure, Registered, Source, normalized


@dataclass(frozen=True)
class Selection:
    """An implementation that was chosen."""

    kind: str
    name: str
    options: Any
    """An instance of its options model."""
    registered: Registered
    reason: str
    """Why this one was chosen."""
    rejected: tuple[tuple[str, str], ...] = ()
    """(name, why not) of the others that `auto` looked at."""
    lost: tuple[str, ...] = ()
    """What users miss of those."""
    next_best: tuple[Registered, ...] = ()
    """What `auto` takes when this one raises `PluginUnavailable`, best first."""


def best_of(
    kind: Kind,
    entries: Collection[Registered],
    ambiguous: Collection[str],
    ctx: ProbeContext,
    *,
    failures: Sequence[Failure],
    path: Path,
) -> Selection:
    """The best that is available: what the user handed over, then by rank. Without options.

    ambiguous: names that several plugins offer, which are passed over. Raises `PluginUnavailable`
    when there is none, and `PluginConflict` when the user handed over two.
    """
    available: list[tuple[Registered, str]] = []
    rejected: list[tuple[str, str]] = []
    lost: list[str] = []
    for entry in entries:
        preferred = entry.source.preferred
        if entry.name in ambiguous:
            rejected.append((entry.name, "several plugins offer this name"))
        elif entry.provider.rank < 0 and not preferred:
            rejected.append((entry.name, "only when named"))
        elif not (answer := availability(entry, ctx)):
            rejected.append((entry.name, answer.reason))
            lost.append(answer.lost)
        elif answer.for_auto or preferred:
            available.append((entry, answer.reason))
        else:
            rejected.append((entry.name, f"only when named: {answer.reason}"))
    if not available:
        why = [f"{name}: {reason}" for name, reason in rejected] or ["none is registered"]
        if failures:
            why.append("not loaded: " + "; ".join(f"{f.source} {f.message}" for f in failures))
        message = f"{dotted(path)}: no {kind.name} can be used here: {'; '.join(why)}"
        raise PluginUnavailable(message, kind=kind.name)
    available.sort(key=lambda item: _order(item[0]))
    (best, note), *rest = available
    others = tuple(entry for entry, _ in rest)
    rejected += [(entry.name, _why_not(entry, best)) for entry in others]
    if best.source.preferred:
        reason, others = f"given by the user ({best.where})", ()
    elif rejected:
        reason = f"the best that is available (rank {best.provider.rank})"
    else:
        reason = "the only one"
    reason = f"{reason}: {note}" if note else reason
    lost = list(dict.fromkeys(filter(None, lost)))
    return Selection(kind.name, best.name, None, best, reason, tuple(rejected), tuple(lost), others)


def _order(entry: Registered) -> tuple[bool, int, bool, str]:
    """The best of available implementations sorts first."""
    source = entry.source
    return (not source.preferred, -entry.provider.rank, not source.built_in, entry.name)


def _why_not(entry: Registered, best: Registered) -> str:
    """Why another was chosen. Raises `PluginConflict` for two that were handed over for one place:
    the user must say which."""
    same = entry.provider.rank == best.provider.rank
    if best.source.preferred and not entry.source.preferred:
        return f"'{best.name}' was given by the user"
    if best.source.preferred and same:
        raise PluginConflict(
            f"{best.kind}: both '{best.name}' ({best.where}) and '{entry.name}' ({entry.where}) "
            f"were given; name one of them as {best.declared.config_path}",
            kind=best.kind,
            name=best.name,
        )
    if same:
        return f"same rank {entry.provider.rank} as '{best.name}'"
    return f"rank {entry.provider.rank}, below '{best.name}'"


def unknown(
    place: str,
    kind: str,
    name: str,
    known: Collection[str],
    *,
    failures: Sequence[Failure],
    left_out: Sequence[tuple[Source, str]],
) -> PluginError:
    """An error about a name that is mistyped, or offered by a plugin that failed or was left out.

    place: begins the message. left_out: plugins that were not loaded, and the setting that says so.
    """
    hint = nearest(name, known)
    message = f"{place}there is no {kind} '{name}'; {hint}"
    if left_out:
        message += f" (left out: {', '.join(f'{source} by {by}' for source, by in left_out)})"
    related = [f for f in failures if _related(f.source, name)]
    if not failures:
        return PluginNotFound(message, kind=kind, name=name)
    if hint.startswith("did you mean") and not related:
        failed = ", ".join(str(f.source) for f in failures)
        message += f" (not looked at, because not loaded: {failed})"
        return PluginNotFound(message, kind=kind, name=name)
    related = related or list(failures)
    failed = "; ".join(f"{f.source} {f.message}" for f in related)
    error = PluginImportError(
        f"{place}{kind} '{name}' is not known, and a plugin that may offer it was not loaded: "
        f"{failed}",
        kind=kind,
        name=name,
        distribution=related[0].source.distribution,
    )
    error.__cause__ = related[0].error
    return error


def _related(source: Source, name: str) -> bool:
    """Whether a plugin's own name suggests that it offers `name`."""
    names = (normalized(source.entry_point or ""), source.distribution or "")
    return any(normalized(name) in known for known in names)
