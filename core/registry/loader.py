"""Finds plugins and calls their hooks, through pluggy."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from octavo.core import envvars
from octavo.core.contracts import KINDS, Provider
from octavo.core.contracts.kind import Kind, KindSpec
from octavo.core.contracts.provider import PROJECT
from octavo.core.errors import ContractError, PluginError, PluginImportError, nearest
from octavo.core.registry.sources import Failure, Registered, Source, explain, normalized

GROUP = "octavo"
KINDS_HOOK = "octavo_kinds"

log = logging.getLogger("octavo.registry")


def find_entry_points() -> list[tuple[EntryPoint, Source]]:
    """All entry points of the group, Octavo's own first, then by distribution and name."""
    found = []
    for point in entry_points(group=GROUP):
        dist = point.dist
        name, version = (normalized(dist.name), dist.version) if dist else (None, None)
        source = Source(f"entry point '{point.name}'", name, version, entry_point=point.name)
        found.append((point, source))
    return sorted(found, key=lambda i: (not i[1].built_in, i[1].distribution or "", i[0].name))


class PluginLoader:
    """The plugin manager, and where each of its plugins comes from.

    First `add_entry_points` and `add`, then `declare_kinds`, then `providers`. What fails of an
    entry point is kept in `failures`; what was asked for by name raises.
    """

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(PROJECT)
        self.kinds: dict[str, Kind] = {}
        self.failures: list[Failure] = []
        self.left_out: list[tuple[Source, str]] = []
        """Entry points that are blocked, and the setting that blocks them."""
        self._sources: dict[int, Source] = {}
        """By id of the plugin, in the order in which they are asked for providers."""
        self.manager.add_hookspecs(KindSpec)
        for kind in KINDS.values():
            self.kinds[kind.name] = kind
            self.manager.add_hookspecs(kind.spec)
        if envvars.TRACE_HOOKS.get():
            self.manager.add_hookcall_monitoring(self._trace_call, self._trace_result)

    # ---- finding plugins --------------------------------------------------------------------

    def add_entry_points(self, disable: Collection[str], only: Collection[str] | None) -> None:
        """Load the entry points of the group that are not blocked."""
        points = find_entry_points()
        if not any(source.built_in for _, source in points):
            raise PluginError(
                "Octavo's own plugins are not registered: the distribution 'octavo' is not "
                "installed here; expected `pip install octavo`, or `pip install -e .` in a checkout"
            )
        loaded: set[str] = set()
        for point, source in points:
            setting = _blocked_by(source, disable, only)
            if setting is not None:
                self.left_out.append((source, setting))
                self.manager.set_blocked(_plugin_name(source))
            elif point.value not in loaded:
                loaded.add(point.value)
                self._load(point, source)

    def _load(self, point: EntryPoint, source: Source) -> None:
        """Load and register one entry point. Pluggy's own loop over them stops at the first that
        is broken, and takes entry points of one name in two distributions for the same."""
        try:
            plugin = point.load()
        except (Exception, SystemExit) as exc:
            self._fail(source, exc, f"cannot be imported: {explain(exc, point.module)}")
            return
        try:
            self.manager.register(plugin, _plugin_name(source))
        except pluggy.PluginValidationError as exc:
            self._fail(source, self._signature_error(plugin, source) or exc)
            return
        self._sources[id(plugin)] = source
        if not self.manager.get_hookcallers(plugin):
            message = "expected the name of a module with functions marked @octavo.hookimpl"
            self._fail(source, PluginError(f"{source}: offers nothing; {message}"))

    def has_hooks(self, item: Any) -> bool:
        """Whether a module or object has hook implementations."""
        return any(self.manager.parse_hookimpl_opts(item, name) for name in dir(item))

    def add(self, plugin: Any, source: Source) -> None:
        """Register a plugin that was asked for by name. Raises `ContractError`."""
        if not self.manager.is_registered(plugin):
            try:
                self.manager.register(plugin, f"{source} {id(plugin)}")
            except pluggy.PluginValidationError as exc:
                raise self._signature_error(plugin, source) or exc from None
        elif not source.preferred:
            return
        self._sources[id(plugin)] = source

    def _fail(self, source: Source, error: BaseException, message: str | None = None) -> None:
        """Drop a plugin. Raises the error where the plugin was asked for by name."""
        if source.entry_point is None:
            raise error
        for plugin, origin in self._plugins():
            if origin is source:
                self.manager.unregister(plugin)
                del self._sources[id(plugin)]
        message = message or str(error).removeprefix(f"{source}: ")
        self.failures.append(Failure(source, message, error))
        log.warning("%s is not used: %s", source, message)

    def _signature_error(self, plugin: Any, source: Source) -> ContractError | None:
        """Names the hook whose signature pluggy refuses, what was expected and what came."""
        for name in dir(plugin):
            options = self.manager.parse_hookimpl_opts(plugin, name)
            hook = options and (options.get("specname") or name)
            signature = inspect.signature(getattr(plugin, name)) if hook else None
            if signature and signature.parameters:
                shown = ", ".join(map(str, signature.parameters.values()))
                return ContractError(
                    f"{source}: hook {hook} has another signature: expected {hook}(), "
                    f"got {hook}({shown})",
                    distribution=source.distribution,
                )
        return None

    # ---- calling hooks ----------------------------------------------------------------------

    def declare_kinds(self) -> None:
        """Add the kinds that plugins declare, and check that every hook is known."""
        declared: list[Kind] = []
        for plugin, source in self._plugins(KINDS_HOOK):
            try:
                for kind in _listed(self._call(KINDS_HOOK, plugin, source)):
                    self._check_kind(kind, source)
                    self.kinds[kind.name] = kind
                    declared.append(kind)
            except PluginError as exc:
                self._fail(source, exc)
        # Hooks that came before their specification are checked by registering them again.
        hooks = [kind.hook for kind in declared]
        waiting = [
            (plugin, source, self.manager.get_name(plugin))
            for plugin, source in self._plugins()
            if any(self._implements(plugin, hook) for hook in hooks)
        ]
        for plugin, _, _ in waiting:
            self.manager.unregister(plugin)
        for kind in declared:
            self.manager.add_hookspecs(kind.spec)
        for plugin, source, name in waiting:
            try:
                self.manager.register(plugin, name)
            except pluggy.PluginValidationError as exc:
                self._fail(source, self._signature_error(plugin, source) or exc)
        while True:
            try:
                self.manager.check_pending()
                return
            except pluggy.PluginValidationError as exc:
                self._fail_unknown(exc.plugin)

    def _fail_unknown(self, plugin: Any) -> None:
        source = self._sources[id(plugin)]
        callers = self.manager.get_hookcallers(plugin) or []
        unknown = next(caller.name for caller in callers if not caller.has_spec())
        known = (kind.hook for kind in self.kinds.values())
        message = f"{source}: there is no hook '{unknown}'; {nearest(unknown, known)}"
        self._fail(source, ContractError(message, distribution=source.distribution))

    def _check_kind(self, kind: Any, source: Source) -> None:
        if not isinstance(kind, Kind):
            raise ContractError(
                f"{source}: hook {KINDS_HOOK} returned {kind!r:.80}, expected a list of Kind"
            )
        names = [name for name in vars(kind.spec) if not name.startswith("_")]
        if len(names) != 1 or self.manager.parse_hookspec_opts(kind.spec, names[0]) is None:
            raise ContractError(
                f"{source}: kind '{kind.name}': its spec must have one function, marked "
                f"@octavo.core.contracts.hookspec, got {', '.join(names) or 'none'}"
            )
        hooks = {known.hook for known in self.kinds.values()}
        if kind.name in self.kinds or kind.hook in hooks:
            raise ContractError(f"{source}: kind '{kind.name}' ({kind.hook}) is declared already")

    def providers(self) -> Iterator[Registered]:
        """What all plugins offer."""
        for plugin, source in self._plugins():
            try:
                found = [
                    entry
                    for kind in self.kinds.values()
                    if self._implements(plugin, kind.hook)
                    for entry in self._offered(kind, plugin, source)
                ]
            except PluginError as exc:
                self._fail(source, exc)
            else:
                yield from found

    def _offered(self, kind: Kind, plugin: Any, source: Source) -> Iterator[Registered]:
        answer = self._call(kind.hook, plugin, source)
        several = isinstance(answer, Iterable)
        for provider in _listed(answer):
            if not isinstance(provider, Provider):
                held = f" that holds {provider!r:.80}" if several else ""
                problem = f"returned {type(answer).__name__}{held}, expected a list of Provider"
            elif provider.problem():
                problem = f"offers a provider {provider.name!r}: {provider.problem()}"
            else:
                yield Registered(provider, kind, source)
                continue
            raise ContractError(
                f"{source}: hook {kind.hook} {problem}",
                kind=kind.name,
                distribution=source.distribution,
            )

    def _call(self, hook: str, plugin: Any, source: Source) -> Any:
        """Call one plugin's hook, so that what it raises stops no other. Pluggy leaves out None."""
        others = [impl.plugin for impl in self._implementations(hook) if impl.plugin is not plugin]
        try:
            answers = self.manager.subset_hook_caller(hook, others)()
            answer = answers[0] if answers else None
            return list(answer) if isinstance(answer, Iterator) else answer  # a generator runs here
        except (Exception, SystemExit) as exc:
            raise PluginImportError(
                f"{source}: hook {hook} failed: {explain(exc, '')}",
                distribution=source.distribution,
            ) from exc

    def _implementations(self, hook: str) -> Sequence[Any]:
        caller = getattr(self.manager.hook, hook, None)
        return caller.get_hookimpls() if caller is not None else ()

    def _implements(self, plugin: Any, hook: str) -> bool:
        return any(impl.plugin is plugin for impl in self._implementations(hook))

    def _plugins(self, hook: str | None = None) -> list[tuple[Any, Source]]:
        """Plugins in order; with a hook, those that implement it."""
        plugins = {id(plugin): plugin for plugin in self.manager.get_plugins()}
        known = [(plugins[key], source) for key, source in self._sources.items() if key in plugins]
        return [item for item in known if hook is None or self._implements(item[0], hook)]

    # ---- OCTAVO_TRACE_HOOKS -----------------------------------------------------------------

    def _trace_call(self, hook: str, impls: Sequence[Any], _: Any) -> None:
        for impl in impls:
            source = self._sources[id(impl.plugin)]
            print(f"octavo hook {hook}: calling {source}", file=sys.stderr)

    def _trace_result(self, outcome: Any, hook: str, impls: Sequence[Any], _: Any) -> None:
        if outcome.exception is not None:
            return
        # An iterator is read here, so its items are handed on.
        answers = [_listed(answer) for answer in outcome.get_result()]
        outcome.force_result(answers)
        for impl, answer in zip(impls, answers, strict=False):
            names = ", ".join(str(getattr(item, "name", item)) for item in answer)
            source = self._sources[id(impl.plugin)]
            print(f"octavo hook {hook}: {source} offers {names or 'nothing'}", file=sys.stderr)


def _plugin_name(source: Source) -> str:
    """A name for pluggy: entry points of two distributions may have the same name."""
    return f"{source.distribution}: {source.entry_point}"


def _listed(answer: Any) -> list[Any]:
    """What a hook returned, as a list: one provider stands for itself."""
    return list(answer) if isinstance(answer, Iterable) else [answer]


def _blocked_by(
    source: Source, disable: Collection[str], only: Collection[str] | None
) -> str | None:
    """The setting that keeps an entry point from being loaded; the built-ins are always allowed."""
    names = {normalized(source.entry_point or ""), source.distribution}
    if names & {normalized(name) for name in disable}:
        return "plugins.disable"
    allowed = {"plugins.only": only, "OCTAVO_PLUGINS": envvars.PLUGINS.get()}
    for setting, chosen in allowed.items():
        outside = chosen is not None and not names & {normalized(name) for name in chosen}
        if outside and not source.built_in:
            return setting
    return None
