"""The registry: every implementation that is known, which of them is chosen, and how it is made.

    registry = Registry.discover(load=["./my.py:Policy"])
    selection = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"))
    policy = registry.create(selection, context)

Third parties and built-ins come through the same entry-point group, hooks and checks. Nothing is
imported of an implementation before it is created, but the module with its options model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core import envvars
from octavo.core.availability import availability
from octavo.core.config.models import ImplementationConfig
from octavo.core.config.origin import Origin, Path, dotted
from octavo.core.contract_checks import check_class, check_factory, version_problem
from octavo.core.contracts import KINDS, ProbeContext
from octavo.core.errors import (
    ConfigError,
    ContractError,
    OctavoError,
    PluginConflict,
    PluginError,
    PluginImportError,
    PluginNotFound,
    PluginUnavailable,
    nearest,
)
from octavo.core.plugin_faults import Made, PluginTimes
from octavo.core.plugin_loading import (
    Hooks,
    Registered,
    Source,
    describe,
    explain,
    find_entry_points,
    from_object,
    import_error,
    import_string,
    load_named,
    normalized,
)
from octavo.core.plugin_options import place, validate_options

log = logging.getLogger("octavo.registry")

__all__ = ["Failure", "Registered", "Registry", "Selection"]


@dataclass(frozen=True)
class Failure:
    """A plugin that could not be loaded. message: why, in one line. error: what was raised."""

    source: Source
    message: str
    error: BaseException


@dataclass(frozen=True)
class Selection:
    """An implementation that was chosen. options: validated. reason: why it. rejected: (name, why
    not) of the others that `auto` looked at. lost: what users miss of those. next_best: what `auto`
    takes when this one refuses to be made, best first."""

    kind: str
    name: str
    options: Any
    registered: Registered
    reason: str
    rejected: tuple[tuple[str, str], ...] = ()
    lost: tuple[str, ...] = ()
    next_best: tuple[Registered, ...] = ()


class Registry:
    """Made by `discover`; what is known does not change afterwards. made: tells whose fault an
    exception is. times: set before anything is made, to time it."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Registered]] = {kind: [] for kind in KINDS}
        self._hooks = Hooks()
        self.made = Made()
        self.times: PluginTimes | None = None
        self.failures: list[Failure] = []
        self._left_out: list[tuple[Source, str]] = []

    # ---- discovery --------------------------------------------------------------------------

    @classmethod
    def discover(
        cls,
        *,
        load: Iterable[str] = (),
        disable: Iterable[str] = (),
        only: Iterable[str] | None = None,
        objects: Iterable[Any] = (),
    ) -> Registry:
        """All plugins: entry points (less `disable`, and of third parties only `only` and what
        OCTAVO_PLUGINS allows), then `load` (as in YAML), then `objects`.

        An entry point that fails is kept in `failures`. Raises `PluginError` for what was asked
        for by name and fails: an item of `load` or `objects`.
        """
        registry = cls()
        registry._add_entry_points(set(disable), None if only is None else set(only))
        for item in load:
            plugin, source = load_named(item)
            registry._add(from_object(plugin, source, registry._hooks))
        for item in objects:
            if isinstance(item, str):
                plugin, source = load_named(item)
            else:
                plugin, source = item, Source(describe(item), preferred=True)
            registry._add(from_object(plugin, source, registry._hooks))
        return registry

    def _add_entry_points(self, disable: set[str], only: set[str] | None) -> None:
        allowed = envvars.PLUGINS.get()
        points = list(find_entry_points())
        if not any(source.built_in for _, source in points):
            raise PluginError(
                "Octavo's own plugins are not registered: the distribution 'octavo' is not "
                "installed here; expected `pip install octavo`, or `pip install -e .` in a checkout"
            )
        for point, source in points:
            names = {normalized(point.name), source.distribution or ""}
            if names & {normalized(name) for name in disable}:
                self._left_out.append((source, "plugins.disable"))
                continue
            lists = {"plugins.only": only, "OCTAVO_PLUGINS": allowed}
            by = [
                where
                for where, chosen in lists.items()
                if chosen is not None and not names & {normalized(name) for name in chosen}
            ]
            if by and not source.built_in:
                self._left_out.append((source, by[0]))
                continue
            try:
                plugin = point.load()
            except (Exception, SystemExit) as exc:
                self._failed(source, f"cannot be imported: {explain(exc, point.module)}", exc)
                continue
            try:
                if not self._hooks.implementations(plugin):
                    raise PluginError(
                        f"{source}: offers nothing; expected the name of a module with functions "
                        "marked @octavo.hookimpl"
                    )
                self._add(self._hooks.register(plugin, source))
            except (OctavoError, ValueError) as exc:
                self._failed(source, str(exc).removeprefix(f"{source}: "), exc)

    def _failed(self, source: Source, message: str, error: BaseException) -> None:
        self.failures.append(Failure(source, message, error))
        log.warning("%s is not used: %s", source, message)

    def _add(self, found: Iterable[Registered]) -> None:
        for new in found:
            known = self._entries[new.kind]
            same = [i for i, old in enumerate(known) if old.provider is new.provider]
            if not same:
                known.append(new)
            elif new.source.preferred:
                known[same[0]] = new

    # ---- what is known ----------------------------------------------------------------------

    def entries(self, kind: str) -> list[Registered]:
        """All implementations of a kind, also those whose names collide."""
        return list(self._entries[self._kind_name(kind)])

    def providers(self, kind: str) -> dict[str, Registered]:
        """Implementations of a kind by name. Of several with one name the first, or the one that
        the user handed over; `select` refuses the name in the former case."""
        found: dict[str, Registered] = {}
        for entry in self._entries[self._kind_name(kind)]:
            if entry.name not in found or entry.source.preferred:
                found[entry.name] = entry
        return found

    def preferred(self, kind: str) -> list[Registered]:
        """Implementations that the user handed over as objects or files."""
        known = self.providers(kind).values()
        return [entry for entry in known if entry.source.preferred]

    def conflicts(self) -> list[tuple[Registered, ...]]:
        """Implementations of one kind that share a name."""
        found = []
        for kind in KINDS:
            by_name: dict[str, list[Registered]] = {}
            for entry in self._entries[kind]:
                by_name.setdefault(entry.name, []).append(entry)
            found += [
                tuple(group)
                for group in by_name.values()
                if len(group) > 1 and not any(entry.source.preferred for entry in group)
            ]
        return found

    def _kind_name(self, kind: str) -> str:
        if kind not in KINDS:
            raise PluginError(f"there is no plugin kind '{kind}'; {nearest(kind, KINDS)}")
        return kind

    # ---- selection --------------------------------------------------------------------------

    def select(
        self,
        kind: str,
        choice: ImplementationConfig,
        ctx: ProbeContext | None = None,
        *,
        explicit: bool = True,
        path: Path | None = None,
        origin: Origin | None = None,
    ) -> Selection:
        """The implementation that `choice` asks for.

        explicit: whether the configuration names it; a mere default gives way to what the user
        handed over as an object or file, as `auto` does. path, origin: of the choice in the
        configuration, for messages; the path defaults to the kind's own.
        """
        ctx = ctx or ProbeContext()
        path = path if path is not None else _default_path(self._kind_name(kind))
        gives_way = not explicit and any(availability(e, ctx) for e in self.preferred(kind))
        if choice.name == "auto" or gives_way:
            found = self._auto(kind, ctx, path)
        else:
            entry = self._named(kind, choice.name, ctx, path, origin)
            found = _Found(entry, "named in the configuration" if explicit else "the default")
        options = validate_options(found.entry, choice.options, path, origin)
        self._check_parts(kind, options, path, origin)
        return Selection(
            kind,
            found.entry.name,
            options,
            found.entry,
            found.reason,
            tuple(found.rejected),
            tuple(found.lost),
            tuple(found.next_best),
        )

    def check(
        self,
        kind: str,
        choice: ImplementationConfig,
        *,
        path: Path | None = None,
        origin: Origin | None = None,
    ) -> None:
        """Raise as `select` does for a name that is unknown or ambiguous and for options that do
        not validate; whether the implementation can be used here is not asked."""
        path = path if path is not None else _default_path(self._kind_name(kind))
        if choice.name != "auto":
            entry = self._known(kind, choice.name, path, origin)
            options = validate_options(entry, choice.options, path, origin)
            self._check_parts(kind, options, path, origin)

    def _check_parts(self, kind: str, options: Any, path: Path, origin: Origin | None) -> None:
        """Check the implementations of the same kind that this one is made of: its options name
        them in `choices()`, and may refuse the factory of one in `check_part(index, factory)`."""
        if not hasattr(options, "choices"):
            return
        for index, choice in enumerate(options.choices()):
            below = (*path, index)
            self.check(kind, choice, path=below, origin=origin)
            if choice.name == "auto" or not hasattr(options, "check_part"):
                continue
            entry = self._known(kind, choice.name, below, origin)
            try:
                options.check_part(index, self._factory(entry))
            except ConfigError as exc:
                file, line = origin.where(below) if origin is not None else (None, None)
                raise ConfigError(exc.message, path=dotted(path), file=file, line=line) from None

    def _named(
        self, kind: str, name: str, ctx: ProbeContext, path: Path, origin: Origin | None
    ) -> Registered:
        entry = self._known(kind, name, path, origin)
        answer = availability(entry, ctx)
        if not answer:
            raise entry.error(
                PluginUnavailable,
                f"{place(path, origin)}{kind} '{name}' cannot be used here: {answer.reason}",
            )
        return entry

    def _known(self, kind: str, name: str, path: Path, origin: Origin | None) -> Registered:
        """The one implementation of this name, written for our contract version."""
        entry = self.providers(kind).get(name)
        if entry is None:
            raise self._unknown(kind, name, place(path, origin))
        self._refuse_conflict(entry)
        problem = version_problem(entry, KINDS[kind])
        if problem:
            raise entry.error(ContractError, problem)
        return entry

    def _refuse_conflict(self, entry: Registered) -> None:
        same = self._same_name(entry)
        if len(same) > 1:
            raise PluginConflict(
                f"{entry.kind} '{entry.name}' is offered by several plugins: "
                f"{' and '.join(str(other.source) for other in same)}; "
                "put one of them into plugins.disable",
                kind=entry.kind,
                name=entry.name,
            )

    def _same_name(self, entry: Registered) -> list[Registered]:
        """Those that share an implementation's name, itself included; what the user handed over
        shadows the others."""
        if entry.source.preferred:
            return [entry]
        return [other for other in self._entries[entry.kind] if other.name == entry.name]

    def _unknown(self, kind: str, name: str, place: str) -> PluginError:
        """Not known: mistyped, or offered by a plugin that failed or was left out."""
        hint = nearest(name, self.providers(kind))
        message = f"{place}there is no {kind} '{name}'; {hint}"
        if self._left_out:
            left_out = ", ".join(f"{source} by {where}" for source, where in self._left_out)
            message += f" (left out: {left_out})"
        related = [f for f in self.failures if _related(f.source, name)] or self.failures
        if not related:
            return PluginNotFound(message, kind=kind, name=name)
        if hint.startswith("did you mean") and related is self.failures:
            failed = ", ".join(str(f.source) for f in related)
            return PluginNotFound(
                f"{message} (not looked at, because not loaded: {failed})", kind=kind, name=name
            )
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

    def _auto(self, kind: str, ctx: ProbeContext, path: Path) -> _Found:
        """The best that is available: what the user handed over, then by rank."""
        available: list[tuple[Registered, str]] = []
        rejected: list[tuple[str, str]] = []
        lost: dict[str, None] = {}
        for entry in self.providers(kind).values():
            if len(self._same_name(entry)) > 1:
                rejected.append((entry.name, "several plugins offer this name"))
            elif entry.provider.rank < 0 and not entry.source.preferred:
                rejected.append((entry.name, "only when named"))
            else:
                answer = availability(entry, ctx)
                if answer and (answer.for_auto or entry.source.preferred):
                    available.append((entry, answer.reason))
                elif answer:
                    rejected.append((entry.name, f"only when named: {answer.reason}"))
                else:
                    rejected.append((entry.name, answer.reason))
                    lost |= {answer.lost: None} if answer.lost else {}
        if not available:
            raise self._none_available(kind, rejected, path)
        available.sort(
            key=lambda item: (
                not item[0].source.preferred,
                -item[0].provider.rank,
                not item[0].source.built_in,
                item[0].name,
            )
        )
        (best, note), others = available[0], available[1:]
        self._refuse_tie(best, [entry for entry, _ in others])
        for entry, _ in others:
            rejected.append((entry.name, self._lost(entry, best)))
        next_best = [] if best.source.preferred else [entry for entry, _ in others]
        return _Found(best, self._won(best, note, rejected), rejected, list(lost), next_best)

    @staticmethod
    def _refuse_tie(best: Registered, others: Sequence[Registered]) -> None:
        """Two things handed over for one place: the user must say which."""
        if not best.source.preferred:
            return
        for other in others:
            if other.source.preferred and other.provider.rank == best.provider.rank:
                raise PluginConflict(
                    f"{best.kind}: both '{best.name}' ({best.where}) and '{other.name}' "
                    f"({other.where}) were given; name one of them as "
                    f"{KINDS[best.kind].config_path}",
                    kind=best.kind,
                    name=best.name,
                )

    @staticmethod
    def _lost(entry: Registered, best: Registered) -> str:
        if best.source.preferred and not entry.source.preferred:
            return f"'{best.name}' was given by the user"
        if entry.provider.rank == best.provider.rank:
            return f"same rank {entry.provider.rank} as '{best.name}'"
        return f"rank {entry.provider.rank}, below '{best.name}'"

    @staticmethod
    def _won(best: Registered, note: str, rejected: Sequence[tuple[str, str]]) -> str:
        if best.source.preferred:
            reason = f"given by the user ({best.where})"
        elif not rejected:
            reason = "the only one"
        else:
            reason = f"the best that is available (rank {best.provider.rank})"
        return f"{reason}: {note}" if note else reason

    def _none_available(
        self, kind: str, rejected: Sequence[tuple[str, str]], path: Path
    ) -> PluginError:
        why = "; ".join(f"{name}: {reason}" for name, reason in rejected)
        failed = "; ".join(f"{f.source} {f.message}" for f in self.failures)
        if not why:
            why = "none is registered"
        if failed:
            why += f"; not loaded: {failed}"
        return PluginUnavailable(f"{dotted(path)}: no {kind} can be used here: {why}", kind=kind)

    # ---- creation ---------------------------------------------------------------------------

    def create(self, selection: Selection, context: Any) -> Any:
        """Import the factory, check that it keeps the contract, and call it with the options and
        `context`. Raises `PluginImportError`, `ContractError`, or what the factory raises of
        Octavo's own errors; any other exception becomes a `PluginError` that names the plugin."""
        entry, kind = selection.registered, KINDS[selection.kind]
        problem = version_problem(entry, kind)
        if problem:
            raise entry.error(ContractError, problem)
        factory = self.factory(selection)
        try:
            made = factory(selection.options, context)
        except OctavoError:
            raise
        except ImportError as exc:
            raise import_error(entry)(f"cannot be made: {explain(exc, '')}") from exc
        except (Exception, SystemExit) as exc:
            message = f"{entry}: cannot be made: {type(exc).__name__}: {exc}"
            raise entry.error(PluginError, message) from exc
        check_class(type(made), kind, entry)
        self.made.add(made, entry)
        if self.times is not None:
            self.times.watch(made, entry, kind.contract)
        return made

    def create_best(
        self, selection: Selection, context: Any
    ) -> tuple[Any, Selection, tuple[tuple[str, str], ...]]:
        """As `create`; but where what `auto` chose raises `PluginUnavailable`, the next best is
        made. Returns what was made, its selection, and (name, why not) of those that refused.
        Raises the first refusal when all refuse."""
        refused: list[tuple[str, str]] = []
        first: PluginUnavailable | None = None
        path = _default_path(selection.kind)
        for entry in (selection.registered, *selection.next_best):
            tried = selection
            if entry is not selection.registered:
                why = f"the next best (rank {entry.provider.rank})"
                options = validate_options(entry, {}, path, None)
                tried = Selection(selection.kind, entry.name, options, entry, why)
            try:
                return self.create(tried, context), tried, tuple(refused)
            except PluginUnavailable as exc:
                first = first or exc
                refused.append((entry.name, str(exc)))
        assert first is not None, "there is one at least to try"
        raise first

    def factory(self, selection: Selection) -> Any:
        """The factory of a selection, imported and checked: often the class itself, whose static
        methods may be asked before anything is made."""
        return self._factory(selection.registered)

    def _factory(self, entry: Registered) -> Any:
        kind, factory = KINDS[entry.kind], entry.provider.factory
        if isinstance(factory, str):
            factory = import_string(factory, "factory", import_error(entry))
        check_factory(factory, entry)
        if isinstance(factory, type):
            check_class(factory, kind, entry)
        return factory


@dataclass(frozen=True)
class _Found:
    """What a selection found; see `Selection`."""

    entry: Registered
    reason: str
    rejected: Sequence[tuple[str, str]] = ()
    lost: Sequence[str] = ()
    next_best: Sequence[Registered] = ()


def _default_path(kind: str) -> Path:
    return tuple(KINDS[kind].config_path.split("."))


def _related(source: Source, name: str) -> bool:
    """Whether a plugin's own name suggests that it offers `name`."""
    wanted = normalized(name)
    names = (normalized(source.entry_point or ""), source.distribution or "")
    return any(wanted in known for known in names)
