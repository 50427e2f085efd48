"""What every conformance suite is: a class whose `test_...` methods are the promises of a contract.

A package that offers an implementation subclasses the suite of its kind in its own tests:

    class TestMyPolicy(SchedulerPolicySuite):
        provider = PROVIDERS[0]

pytest collects it. `octavo plugins check` runs the same methods without pytest, by `run_suite`. So
the methods take no fixtures, and the first line of their docstring is the promise in words.
"""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import traceback
import unittest
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from octavo.core.config.models import ImplementationConfig
from octavo.core.contracts import Options, Provider
from octavo.core.plugin_loading import Registered, Source, describe
from octavo.core.plugin_options import options_model, validate_options
from octavo.core.registry import Registry, Selection

_SUITES = os.path.realpath(Path(__file__).parent)
_OCTAVO = [
    os.path.realpath(Path(__file__).parents[2] / folder)
    for folder in ("core", "kernels", "engine", "frontend", "testing")
]
_LIBRARIES = ("numpy", "starlette", "torch")
"""Whose frames are not where a mistake is."""


class NotApplicable(unittest.SkipTest):
    """A promise that this implementation does not make; says why. pytest shows it as skipped."""


@dataclass(frozen=True)
class Verdict:
    """promise: the name of the method without `test_`. text: the promise in words. outcome: `kept`,
    `broken` or `not applicable`. message: what went wrong, or why it does not apply. details: the
    traceback of a broken one."""

    promise: str
    text: str
    outcome: str
    message: str = ""
    details: str = ""

    def __bool__(self) -> bool:
        return self.outcome != "broken"


class ConformanceSuite:
    """Base of the suites.

    provider: what is tested, as the package registers it. options: for its options model, as a
    configuration would give them. entry: instead of a provider, what a registry found. Override
    `make` instead to build the implementation yourself.
    """

    kind: ClassVar[str]
    entry: ClassVar[Registered | None] = None
    provider: ClassVar[Provider[Any] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}

    def make(self, context: Any) -> Any:
        """The implementation under test for one engine."""
        return registry().create(self.selection(), context)

    def selection(self) -> Selection:
        """What the registry would have chosen, with validated options."""
        entry = self.registered()
        choice = ImplementationConfig.model_validate({"name": entry.name, **self.options})
        options = validate_options(entry, choice.options, tuple(self.kind.split(".")), None)
        return Selection(self.kind, entry.name, options, entry, "under test")

    @classmethod
    def registered(cls) -> Registered:
        """The provider with its origin, for messages."""
        if cls.entry is not None:
            return cls.entry
        if cls.provider is None:
            raise TypeError(
                f"{cls.__name__} needs a `provider`, or its own `make(self, context)`: "
                f"see octavo.testing.{cls.__mro__[1].__name__}"
            )
        return Registered(cls.provider, cls.kind, Source(describe(cls)))

    # ---- promises of every kind -------------------------------------------------------------

    def test_provider_is_well_formed(self) -> None:
        """The provider imports, and its class keeps the contract's methods and signatures."""
        self._needs_provider()
        entry = self.registered()
        registry().factory(self.selection())
        assert entry.name == entry.name.lower(), f"its name '{entry.name}' is not lower case"
        assert entry.provider.summary, f"'{entry.name}' has no summary for `octavo plugins`"

    def test_options_are_described_and_strict(self) -> None:
        """Every option has a description, and an unknown one is refused."""
        self._needs_provider()
        model = options_model(self.registered())
        assert issubclass(model, Options), f"{model.__name__} does not inherit from Options"
        undescribed = [name for name, field in model.model_fields.items() if not field.description]
        assert not undescribed, f"options without a description: {', '.join(undescribed)}"
        assert model.model_config.get("extra") == "forbid", (
            f"{model.__name__} takes unknown options; Options refuses them"
        )

    def _needs_provider(self) -> None:
        if self.provider is None and self.entry is None:
            raise NotApplicable("the suite was given no provider")


_registry: list[Registry] = []


def registry() -> Registry:
    """The installed plugins, found once a process."""
    if not _registry:
        _registry.append(Registry.discover())
    return _registry[0]


def create(kind: str, choice: Any, context: Any) -> Any:
    """An installed implementation, by name or mapping with `name` and options."""
    selection = registry().select(kind, ImplementationConfig.model_validate(choice))
    return registry().create(selection, context)


# ---- running without pytest ---------------------------------------------------------------------


def promises(suite: type[ConformanceSuite]) -> list[str]:
    """Names of the suite's promises, in order of definition, those of the base class last."""
    found: list[str] = []
    for cls in suite.__mro__:
        names = [name for name in vars(cls) if name.startswith("test_")]
        found += [name for name in names if name not in found and callable(getattr(suite, name))]
    return found


def run_suite(
    suite: type[ConformanceSuite], progress: Callable[[Verdict], None] | None = None
) -> list[Verdict]:
    """Run every promise on a fresh instance. Any exception of the implementation is a verdict."""
    verdicts = []
    for name in promises(suite):
        verdict = run_promise(suite, name)
        verdicts.append(verdict)
        if progress is not None:
            progress(verdict)
    return verdicts


def promise_text(suite: type[ConformanceSuite], name: str) -> str:
    """A promise in words: the first paragraph of its docstring, on one line."""
    return " ".join((inspect.getdoc(getattr(suite, name)) or name).split("\n\n")[0].split())


def run_promise(suite: type[ConformanceSuite], name: str) -> Verdict:
    """Run one promise, by the name of its method."""
    method = getattr(suite, name)
    text = promise_text(suite, name)
    short = name.removeprefix("test_")
    try:
        method(suite())
    except unittest.SkipTest as reason:
        return Verdict(short, text, "not applicable", str(reason))
    except Exception as error:
        message = str(error).strip() or type(error).__name__
        message = message.splitlines()[0]
        if not isinstance(error, AssertionError):
            message = f"{type(error).__name__}: {message} ({_place(error)})"
        return Verdict(short, text, "broken", message, traceback.format_exc())
    return Verdict(short, text, "kept")


def _place(error: Exception) -> str:
    """Where it was raised: the last line of the implementation, or of the suite, which was given
    what it cannot use."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [*_OCTAVO, sysconfig.get_path("stdlib")]
    foreign += [str(Path(file).parent) for name in _LIBRARIES if (file := _file(name))]

    def strange(frame: traceback.FrameSummary) -> bool:
        file = os.path.realpath(frame.filename)
        return not any(file.startswith(folder + os.sep) for folder in foreign)

    suite = [frame for frame in frames if os.path.realpath(frame.filename).startswith(_SUITES)]
    last = [frame for frame in frames if strange(frame)] or suite or frames
    frame = last[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}: {frame.line}"


def _file(module: str) -> str | None:
    found = sys.modules.get(module)
    return None if found is None else getattr(found, "__file__", None)


# ---- cost ---------------------------------------------------------------------------------------


def executed_lines(call: Callable[[], Any], limit: int = 1_000_000) -> int:
    """Lines of Python that a call executes: a measure of cost that does not depend on the machine.

    A loop over rows shows as lines in proportion to the rows; vectorised code does not.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            assert count < limit, f"more than {limit} lines were executed"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
