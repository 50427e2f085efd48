"""Making the chosen implementation: imports, contract and signatures are checked first."""

from __future__ import annotations

import pytest

from octavo.core.config import ImplementationConfig
from octavo.core.contracts import Provider
from octavo.core.contracts.attention_backend import AttentionBackend
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.errors import (
    CapacityError,
    ContractError,
    PluginError,
    PluginImportError,
)
from octavo.core.registry import Registry


class Good(SchedulerPolicy):
    def add(self, request):
        pass

    def remove(self, handle):
        return False

    def peek(self):
        return None

    def pop(self):
        raise IndexError

    def __len__(self):
        return 0


def create(factory, kind="scheduler_policy"):
    registry = Registry.discover(objects=[(kind, Provider(name="mine", factory=factory))])
    return registry.create(registry.select(kind, ImplementationConfig(name="mine")), "context")


def message(factory, kind="scheduler_policy", error=ContractError):
    with pytest.raises(error) as caught:
        create(factory, kind)
    assert (caught.value.kind, caught.value.name) == (kind, "mine")
    return str(caught.value).removeprefix(f"{kind} 'mine' (provider mine): ")


# ---- importing the factory ----------------------------------------------------------------------


def test_factory_that_cannot_be_imported(folder):
    folder.module("needs", "import no_such_dependency")
    folder.module("has", "class Policy: pass")
    folder.module("breaks", "raise RuntimeError('boom')")
    assert message("no_such_plugin.policy:Policy", error=PluginImportError) == (
        "its factory 'no_such_plugin.policy:Policy' cannot be imported: module 'no_such_plugin' is "
        "not installed or not on the path"
    )
    assert message("needs:Policy", error=PluginImportError) == (
        "its factory 'needs:Policy' cannot be imported: its dependency 'no_such_dependency' is not "
        "installed"
    )
    assert message("breaks:Policy", error=PluginImportError) == (
        "its factory 'breaks:Policy' cannot be imported: RuntimeError: boom"
    )
    assert message("has:Polici", error=PluginImportError) == (
        "its factory 'has:Polici': module 'has' has no 'Polici'; did you mean 'Policy'?"
    )


def test_dependency_that_is_missing_only_when_the_factory_runs():
    def factory(options, context):
        import no_such_dependency

        return no_such_dependency

    assert message(factory, error=PluginImportError) == (
        "cannot be made: its dependency 'no_such_dependency' is not installed"
    )


def test_other_errors_of_a_factory():
    def fails(options, context):
        raise ValueError("bad luck")

    def octavo_error(options, context):
        raise CapacityError("no room")

    assert message(fails, error=PluginError) == "cannot be made: ValueError: bad luck"
    with pytest.raises(CapacityError, match=r"^no room$"):
        create(octavo_error)


# ---- the contract -------------------------------------------------------------------------------


def test_missing_abstract_methods():
    class Incomplete(SchedulerPolicy):
        def __init__(self, options, context):
            pass

        def add(self, request):
            pass

        def __len__(self):
            return 0

    assert message(Incomplete).endswith(
        "Incomplete does not implement peek(), pop(), remove(handle)"
    )


def test_class_outside_the_contract():
    class Unrelated:
        def __init__(self, options, context):
            pass

    assert message(Unrelated).endswith("Unrelated does not inherit from SchedulerPolicy")
    assert message(lambda o, c: 3) == "class int does not inherit from SchedulerPolicy"


def test_factory_signature():
    class NoArguments(Good):
        pass

    assert message(NoArguments).endswith(
        "NoArguments has another signature: expected (options, context), got ()"
    )

    class Three(Good):
        def __init__(self, options, context, extra):
            pass

    assert message(Three).endswith(
        "Three has another signature: expected (options, context), got (options, context, extra)"
    )
    assert message("json:__name__") == "its factory is str, expected a callable"


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (lambda self: False, "remove has another signature: expected (handle), got ()"),
        (
            lambda self, handle, force: False,
            "remove has another signature: expected (handle), got (handle, force)",
        ),
        (lambda self, h: False, "remove has another signature: expected (handle), got (h)"),
        (3, "remove is int, expected a method"),
    ],
)
def test_method_signatures(method, expected):
    policy = type("Bad", (Good,), {"remove": method, "__init__": lambda s, options, context: None})
    assert message(policy) == f"Bad.{expected}"


@pytest.mark.parametrize(
    "method",
    [
        lambda self, handle, force=False: False,
        lambda self, *args: False,
        lambda self, *args, **kwargs: False,
        lambda self, handle, *, force=False: False,
    ],
)
def test_method_signatures_that_accept_more(method):
    policy = type("Fine", (Good,), {"remove": method, "__init__": lambda s, options, context: None})
    assert isinstance(create(policy), SchedulerPolicy)


def test_optional_methods_are_checked_as_well():
    class Bad(Good):
        def __init__(self, options, context):
            pass

        def cap(self, view):
            return None

    assert message(Bad).endswith("Bad.cap has another signature: expected (view, want), got (view)")


def test_static_methods_and_keywords():
    class Backend(AttentionBackend):
        def __init__(self, options, context):
            pass

        @staticmethod
        def supports(spec):
            return None

        @staticmethod
        def kv_layouts(spec):
            return []

        def plan(self, batch):
            pass

        def run(self, layer, q, k, v, out):
            pass

    assert message(Backend, "attention_backend").endswith(
        "Backend.supports has another signature: expected (spec, platform), got (spec)"
    )


def test_a_contract_without_abstract_methods():
    class Watcher(Observer):
        def __init__(self, options, context):
            self.context = context

    assert create(Watcher, "observer").context == "context"

    class Wrong(Observer):
        def __init__(self, options, context):
            pass

        def on_step(self):
            pass

    assert message(Wrong, "observer").endswith(
        "Wrong.on_step has another signature: expected (record), got ()"
    )


def test_a_function_as_factory_is_checked_by_what_it_returns():
    class Wrong(Good):
        def peek(self, deep):
            return None

    assert message(lambda options, context: Wrong()).endswith(
        "Wrong.peek has another signature: expected (), got (deep)"
    )
    assert isinstance(create(lambda options, context: Good()), Good)


def test_parameters_in_another_order_are_refused():
    class Swapped(Good):
        def __init__(self, options, context):
            pass

        def cap(self, want, view):
            return None

    assert message(Swapped).endswith("expected (view, want), got (want, view)")
