"""What is known of each kind, which implementation is selected, and its creation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from octavo.core.config.models import ImplementationConfig
from octavo.core.config.origin import Origin, Path, dotted
from octavo.core.contracts import ProbeContext
from octavo.core.contracts.kind import Kind
from octavo.core.errors import (
    ConfigError,
    ContractError,
    OctavoError,
    PluginConflict,
    PluginError,
    PluginUnavailable,
    nearest,
)
from octavo.core.registry.checks import (
    availability,
    check_class,
    check_factory,
    version_problem,
)
from octavo.core.registry.faults import Owners, PluginTimes
from octavo.core.registry.loader import PluginLoader
from octavo.core.registry.objects import describe, registered
from octavo.core.registry.options import place, validate_options
from octavo.core.registry.selection import Selection, best_of, unknown
from octavo.core.registry.sources import (
    Registered,
    Source,
    explain,
    import_string,
    load_named,
)


class Registry:
    """Made by `discover`; what is known does not change afterwards."""

    def __init__(self, loader: PluginLoader) -> None:
        self.kinds: dict[str, Kind] = loader.kinds
        """Every kind by name: the engine's first, then those that plugins declare."""
        self.failures = loader.failures
        self.owners = Owners()
        """Tells which implementation an exception comes from."""
        self.times: PluginTimes | None = None
        """Set before anything is created, to time it."""
        self._left_out = loader.left_out
        self._entries: dict[str, list[Registered]] = {kind: [] for kind in loader.kinds}

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
        loader = PluginLoader()
        loader.add_entry_points(set(disable), None if only is None else set(only))
        given = [load_named(item) for item in load]
        for item in objects:
            named = isinstance(item, str)
            given.append(load_named(item) if named else (item, _handed_over(item)))
        others = []
        for item, source in given:
            if not isinstance(item, type | tuple) and loader.has_hooks(item):
                loader.add(item, source)
            else:
                others.append((item, source))
        loader.declare_kinds()
        registry = cls(loader)
        registry._add(loader.providers())
        for item, source in others:
            registry._add(registered(item, source, loader.kinds))
        return registry

    def _add(self, found: Iterable[Registered]) -> None:
        for new in found:
            known = self._entries[new.kind]
            same = [i for i, old in enumerate(known) if old.provider is new.provider]
            if not same:
                known.append(new)
            elif new.source.preferred:
                known[same[0]] = new

    # ---- what is known ----------------------------------------------------------------------

    def kind(self, name: str) -> Kind:
        """A kind by name. Raises `PluginError` for one that nobody declares."""
        if name not in self.kinds:
            raise PluginError(f"there is no plugin kind '{name}'; {nearest(name, self.kinds)}")
        return self.kinds[name]

    def entries(self, kind: str) -> list[Registered]:
        """All implementations of a kind, also those whose names collide."""
        return list(self._entries[self.kind(kind).name])

    def providers(self, kind: str) -> dict[str, Registered]:
        """Implementations of a kind by name. Of several with one name the first, or the one that
        the user handed over; `select` refuses the name in the former case."""
        found: dict[str, Registered] = {}
        for entry in self.entries(kind):
            if entry.name not in found or entry.source.preferred:
                found[entry.name] = entry
        return found

    def preferred(self, kind: str) -> list[Registered]:
        """Implementations that the user handed over as objects or files."""
        return [entry for entry in self.providers(kind).values() if entry.source.preferred]

    def conflicts(self) -> list[tuple[Registered, ...]]:
        """Implementations of one kind that share a name."""
        groups = [
            tuple(self._same_name(entry))
            for kind in self.kinds
            for entry in self.providers(kind).values()
        ]
        return [group for group in groups if len(group) > 1]

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
        path = path if path is not None else self._default_path(kind)
        gives_way = not explicit and any(availability(e, ctx) for e in self.preferred(kind))
        if choice.name == "auto" or gives_way:
            entries = self.providers(kind).values()
            ambiguous = {entry.name for entry in entries if len(self._same_name(entry)) > 1}
            found = best_of(
                self.kind(kind), entries, ambiguous, ctx, failures=self.failures, path=path
            )
        else:
            entry = self._named(kind, choice.name, ctx, path, origin)
            reason = "named in the configuration" if explicit else "the default"
            found = Selection(kind, entry.name, None, entry, reason)
        return replace(found, options=self._options(found.registered, choice, path, origin))

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
        path = path if path is not None else self._default_path(kind)
        if choice.name != "auto":
            self._options(self._known(kind, choice.name, path, origin), choice, path, origin)

    def _options(
        self, entry: Registered, choice: ImplementationConfig, path: Path, origin: Origin | None
    ) -> Any:
        """Validated options, and the implementations that they name checked as well."""
        options = validate_options(entry, choice.options, path, origin)
        self._check_nested(entry.kind, options, path, origin)
        return options

    def _default_path(self, kind: str) -> Path:
        return tuple(self.kind(kind).config_path.split("."))

    def _check_nested(self, kind: str, options: Any, path: Path, origin: Origin | None) -> None:
        """Check the implementations of the same kind that this one is composed of: its options name
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
            where = place(path, origin)
            known = self.providers(kind)
            raise unknown(where, kind, name, known, failures=self.failures, left_out=self._left_out)
        same = self._same_name(entry)
        if len(same) > 1:
            raise PluginConflict(
                f"{kind} '{name}' is offered by several plugins: "
                f"{' and '.join(str(other.source) for other in same)}; "
                "put one of them into plugins.disable",
                kind=kind,
                name=name,
            )
        problem = version_problem(entry)
        if problem:
            raise entry.error(ContractError, problem)
        return entry

    def _same_name(self, entry: Registered) -> list[Registered]:
        """Those that share an implementation's name, itself included; what the user handed over
        shadows the others."""
        if entry.source.preferred:
            return [entry]
        return [other for other in self._entries[entry.kind] if other.name == entry.name]

    # ---- creation ---------------------------------------------------------------------------

    def create(self, selection: Selection, context: Any) -> Any:
        """Import the factory, check that it keeps the contract, and call it with the options and
        `context`. Raises `PluginImportError`, `ContractError`, or what the factory raises of
        Octavo's own errors; any other exception becomes a `PluginError` that names the plugin."""
        entry = selection.registered
        problem = version_problem(entry)
        if problem:
            raise entry.error(ContractError, problem)
        factory = self.factory(selection)
        try:
            created = factory(selection.options, context)
        except OctavoError:
            raise
        except ImportError as exc:
            raise entry.import_error(f"cannot be made: {explain(exc, '')}") from exc
        except (Exception, SystemExit) as exc:
            message = f"{entry}: cannot be made: {type(exc).__name__}: {exc}"
            raise entry.error(PluginError, message) from exc
        check_class(type(created), entry)
        self.owners.add(created, entry)
        if self.times is not None:
            self.times.watch(created, entry, entry.declared.contract)
        return created

    def create_best(
        self, selection: Selection, context: Any
    ) -> tuple[Any, Selection, tuple[tuple[str, str], ...]]:
        """As `create`; but where what `auto` chose raises `PluginUnavailable`, the next best is
        created. Returns it, its selection, and (name, why not) of those that refused.
        Raises the first refusal when all refuse."""
        refused: list[tuple[str, str]] = []
        first: PluginUnavailable | None = None
        path = self._default_path(selection.kind)
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

    @staticmethod
    def _factory(entry: Registered) -> Any:
        factory = entry.provider.factory
        if isinstance(factory, str):
            factory = import_string(factory, "factory", entry.import_error)
        check_factory(factory, entry)
        if isinstance(factory, type):
            check_class(factory, entry)
        return factory


def _handed_over(item: Any) -> Source:
    return Source(describe(item), preferred=True)
