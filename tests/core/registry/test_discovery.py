"""Where plugins come from, and what happens to those that cannot be loaded."""

from __future__ import annotations

import logging
import types

import pytest

from octavo.core.config import ImplementationConfig
from octavo.core.contracts import Provider, hookimpl
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.errors import (
    ContractError,
    PluginError,
    PluginImportError,
    PluginNotFound,
)
from octavo.core.registry import Registry, Selection
from octavo.core.registry.checks import version_problem


class Tiny(SchedulerPolicy):
    """A policy that queues nothing."""

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


class WithContext(Tiny):
    name = "own_name"

    def __init__(self, context):
        self.context = context


class Defaulted(Tiny):
    def __init__(self, gamma=2.0):
        self.gamma = gamma


def made(registry, name, context="ctx"):
    return registry.create(
        registry.select("scheduler_policy", ImplementationConfig(name=name)), context
    )


def test_built_ins_come_from_octavos_own_entry_points():
    registry = Registry.discover()
    entry = registry.providers("scheduler_policy")["fcfs"]
    assert entry.distribution == "octavo"
    assert entry.where == "entry point 'octavo-plugins'"
    assert entry.version
    assert not registry.failures
    assert not registry.conflicts()


def test_every_built_in_keeps_its_contract():
    registry = Registry.discover()
    for kind in registry.kinds:
        for entry in registry.entries(kind):
            assert version_problem(entry) is None
            assert entry.provider.summary, f"{entry} has no summary"
            if not entry.provider.requires:
                selected = Selection(kind, entry.name, None, entry, "")
                assert callable(registry.factory(selected))


def test_octavo_must_be_installed(monkeypatch):
    monkeypatch.setattr("octavo.core.registry.loader.find_entry_points", list)
    with pytest.raises(PluginError, match="Octavo's own plugins are not registered: the distrib"):
        Registry.discover()


def test_third_party_distribution(folder):
    folder.policy("acme-fair", "acme")
    registry = Registry.discover()
    entry = registry.providers("scheduler_policy")["acme"]
    assert (entry.distribution, entry.version) == ("acme-fair", "1.0")
    policy = made(registry, "acme")
    assert policy.context == "ctx"
    assert type(policy.options).__name__ == "NoOptions"


@pytest.mark.parametrize("name", ["acme-fair", "Acme_Fair"])
def test_disable(folder, name):
    folder.policy("acme-fair", "acme")
    assert "acme" not in Registry.discover(disable=[name]).providers("scheduler_policy")


def test_disable_by_entry_point_name(folder):
    folder.policy("one", "first")
    folder.distribution("two", "2.0", {"second-point": "one"})
    registry = Registry.discover(disable=["one"])
    assert registry.providers("scheduler_policy")["first"].distribution == "two"
    registry = Registry.discover(disable=["one", "second-point"])
    assert "first" not in registry.providers("scheduler_policy")


def test_only_leaves_built_ins(folder):
    folder.policy("acme-a", "policy_a")
    folder.policy("acme-b", "policy_b")
    names = Registry.discover(only=["acme-b"]).providers("scheduler_policy")
    assert "policy_b" in names
    assert "policy_a" not in names
    assert "fcfs" in names
    assert "fcfs" in Registry.discover(only=[]).providers("scheduler_policy")


def test_environment_allowlist(folder, monkeypatch):
    folder.policy("acme-a", "policy_a")
    folder.policy("acme-b", "policy_b")
    monkeypatch.setenv("OCTAVO_PLUGINS", "acme-a, other")
    names = Registry.discover().providers("scheduler_policy")
    assert "policy_a" in names
    assert "policy_b" not in names
    assert "fcfs" in names
    monkeypatch.setenv("OCTAVO_PLUGINS", "")
    assert "policy_a" not in Registry.discover().providers("scheduler_policy")


# ---- plugins.load -------------------------------------------------------------------------------


def test_load_module(folder):
    folder.policy("my_mod", "mine")
    registry = Registry.discover(load=["my_mod"], disable=["my_mod"])
    entry = registry.providers("scheduler_policy")["mine"]
    assert (entry.distribution, entry.where) == (None, "module my_mod")
    assert not entry.source.preferred


def test_a_module_loaded_twice_is_no_conflict(folder):
    folder.policy("my_mod", "mine")
    registry = Registry.discover(load=["my_mod"])
    assert not registry.conflicts()
    assert made(registry, "mine").context == "ctx"


FILE = """
from octavo.core.contracts.scheduler_policy import SchedulerPolicy

class MyLRUPolicy(SchedulerPolicy):
    '''Does little.'''
    def add(self, request): pass
    def remove(self, handle): return False
    def peek(self): return None
    def pop(self): raise IndexError
    def __len__(self): return 0

class Other(MyLRUPolicy):
    pass
"""


def test_load_file_takes_every_class_of_a_contract(folder):
    file = folder.module("loose", FILE)
    registry = Registry.discover(load=[str(file)])
    names = registry.providers("scheduler_policy")
    assert {"my_lru_policy", "other"} <= set(names)
    assert names["my_lru_policy"].where == f"file {file}"
    assert names["my_lru_policy"].provider.summary == "Does little."
    assert names["my_lru_policy"].source.preferred


def test_load_file_attribute(folder):
    file = folder.module("loose", FILE)
    names = Registry.discover(load=[f"{file}:Other"]).providers("scheduler_policy")
    assert "other" in names
    assert "my_lru_policy" not in names


def test_load_file_with_hooks(folder):
    folder.policy("hooked", "from_hook")
    file = folder.path / "hooked.py"
    registry = Registry.discover(load=[str(file)], disable=["hooked"])
    assert registry.providers("scheduler_policy")["from_hook"].source.preferred


def test_load_relative_file(folder, monkeypatch):
    folder.module("loose", FILE)
    monkeypatch.chdir(folder.path)
    assert "other" in Registry.discover(load=["./loose.py:Other"]).providers("scheduler_policy")


def test_load_errors(folder):
    with pytest.raises(PluginImportError, match=r"plugins\.load: there is no file 'nowhere\.py'"):
        Registry.discover(load=["nowhere.py"])
    with pytest.raises(
        PluginImportError,
        match=r"plugins\.load: 'no_such_mod' cannot be imported: module 'no_such_mod' is not "
        r"installed or not on the path",
    ):
        Registry.discover(load=["no_such_mod"])
    folder.module("needy", "import no_such_dependency")
    with pytest.raises(
        PluginImportError,
        match=r"'needy' cannot be imported: its dependency 'no_such_dependency' is not installed",
    ):
        Registry.discover(load=["needy"])
    broken = folder.module("broken", "1 / 0")
    with pytest.raises(PluginImportError, match=r"broken\.py' cannot be imported: ZeroDivisionErr"):
        Registry.discover(load=[str(broken)])
    folder.module("typo", "class Policy: pass")
    with pytest.raises(
        PluginImportError, match="module typo has no 'Polizy'; did you mean 'Policy'"
    ):
        Registry.discover(load=["typo:Polizy"])
    folder.module("empty", "x = 1")
    with pytest.raises(
        PluginError, match="module empty: offers nothing; expected functions marked"
    ):
        Registry.discover(load=["empty"])


INCOMPLETE = """
from octavo.core.contracts.scheduler_policy import SchedulerPolicy
class Mine(SchedulerPolicy):
    def add(self, request): pass
    def remove(self, handle): return False
    def peek(self): return None
    def __len__(self): return 0
"""


def test_a_class_that_lacks_a_method_is_named_with_what_it_lacks(folder):
    file = folder.module("unfinished", INCOMPLETE)
    with pytest.raises(
        PluginError,
        match="offers nothing that is complete: class Mine lacks pop of scheduler_policy; expected",
    ):
        Registry.discover(load=[str(file)])


def test_an_entry_point_that_offers_nothing_says_so(folder):
    folder.policy("fine-one", "fine_one")
    folder.distribution("forgetful", "1", {"forgetful": "fine_one:Policy"})
    registry = Registry.discover()
    (failure,) = registry.failures
    assert failure.message == (
        "offers nothing; expected the name of a module with functions marked @octavo.hookimpl"
    )
    with pytest.raises(PluginImportError, match="'forgetful' 1 offers nothing; expected the name"):
        registry.select("scheduler_policy", ImplementationConfig(name="forgetful"))


def test_a_name_that_is_not_known_tells_what_was_left_out(folder, monkeypatch):
    folder.policy("acme", "acme_policy")
    wanted = ImplementationConfig(name="acme_policy")
    left_out = (
        r"there is no scheduler_policy 'acme_policy'.*left out: entry point 'acme' of distr.* by "
    )
    with pytest.raises(PluginNotFound, match=left_out + r"plugins\.disable"):
        Registry.discover(disable=["acme"]).select("scheduler_policy", wanted)
    with pytest.raises(PluginNotFound, match=left_out + r"plugins\.only"):
        Registry.discover(only=["other"]).select("scheduler_policy", wanted)
    monkeypatch.setenv("OCTAVO_PLUGINS", "other")
    with pytest.raises(PluginNotFound, match=left_out + "OCTAVO_PLUGINS"):
        Registry.discover().select("scheduler_policy", wanted)


def test_a_package_offers_the_classes_that_it_brings_to_its_top(folder):
    package = folder.path / "brings"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from brings.policy import Mine, Mine as Again\n"
        "from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy\n"
    )
    (package / "policy.py").write_text(INCOMPLETE + "    def pop(self): raise IndexError\n")
    registry = Registry.discover(load=["brings"])
    offered = [e for e in registry.entries("scheduler_policy") if e.where == "module brings"]
    assert [entry.name for entry in offered] == ["mine"]


@pytest.mark.parametrize("returned", ["provider", "[provider]", "iter([provider])"])
def test_traced_hooks_say_what_they_offer(folder, monkeypatch, capsys, returned):
    folder.module(
        "traced",
        f"""
        from octavo.core.contracts import Provider, hookimpl
        provider = Provider(name="shown", factory="nowhere:Policy")
        @hookimpl
        def octavo_scheduler_policies(): return {returned}
        """,
    )
    monkeypatch.setenv("OCTAVO_TRACE_HOOKS", "1")
    assert "shown" in Registry.discover(load=["traced"]).providers("scheduler_policy")
    assert "module traced offers shown\n" in capsys.readouterr().err


# ---- objects ------------------------------------------------------------------------------------


def test_class_instance_pair_and_module_as_objects():
    instance = WithContext("given")
    module = types.ModuleType("some_module")
    provider = Provider(name="by_hook", factory=Tiny)

    @hookimpl
    def octavo_scheduler_policies():
        return [provider]

    module.octavo_scheduler_policies = octavo_scheduler_policies
    pair = ("scheduler_policy", Provider(name="paired", factory=lambda o, c: Tiny()))
    registry = Registry.discover(objects=[Tiny, instance, pair, module, Defaulted])
    assert type(made(registry, "tiny")) is Tiny
    assert made(registry, "own_name") is instance
    assert type(made(registry, "paired")) is Tiny
    assert made(registry, "defaulted").gamma == 2.0
    entry = registry.providers("scheduler_policy")["by_hook"]
    assert entry.where == "module some_module"


def test_options_that_are_no_options_model_are_refused():
    class Odd(Tiny):
        Options = dict

    with pytest.raises(ContractError, match=r"class .*Odd: its attribute Options must be a class"):
        Registry.discover(objects=[Odd])


def test_a_class_may_take_the_context_first():
    class Swapped(Tiny):
        def __init__(self, context, options):
            self.got = (options, context)

    assert made(Registry.discover(objects=[Swapped]), "swapped").got[1] == "ctx"


def test_class_factories_by_number_of_arguments():
    class Both(Tiny):
        def __init__(self, options, context):
            self.got = (options, context)

    class OnlyOptions(Tiny):
        def __init__(self, options):
            self.got = options

    registry = Registry.discover(objects=[Both, OnlyOptions, WithContext])
    assert made(registry, "both").got[1] == "ctx"
    assert type(made(registry, "only_options").got).__name__ == "NoOptions"
    assert made(registry, "own_name").context == "ctx"


def test_object_with_hook_methods():
    class Plugin:
        @hookimpl
        def octavo_observers(self):
            return [Provider(name="seen", factory=lambda o, c: Observer())]

    assert "seen" in Registry.discover(objects=[Plugin()]).providers("observer")


def test_a_string_object_is_loaded(folder):
    file = folder.module("loose", FILE)
    assert "other" in Registry.discover(objects=[f"{file}:Other"]).providers("scheduler_policy")


def test_useless_objects():
    with pytest.raises(PluginError, match=r"cannot use 3 as a plugin: expected a class or an inst"):
        Registry.discover(objects=[3])
    with pytest.raises(
        PluginError, match="there is no plugin kind 'schedule_policy'; did you mean"
    ):
        Registry.discover(objects=[("schedule_policy", Provider(name="a", factory=Tiny))])
    with pytest.raises(PluginError, match=r"expected a pair \(kind, Provider\)"):
        Registry.discover(objects=[("scheduler_policy", 3)])


# ---- plugins that fail --------------------------------------------------------------------------


def test_unselected_import_failure_is_kept_and_logged_once(folder, caplog):
    folder.module("bad_mod", "import no_such_dependency")
    folder.distribution("bad-dist", "0.3", {"bad": "bad_mod"})
    with caplog.at_level(logging.WARNING, logger="octavo.registry"):
        registry = Registry.discover()
        assert made_name(registry) == "fcfs"
    (failure,) = registry.failures
    assert failure.source.distribution == "bad-dist"
    assert (
        failure.message
        == "cannot be imported: its dependency 'no_such_dependency' is not installed"
    )
    assert isinstance(failure.error, ModuleNotFoundError)
    assert [r.message for r in caplog.records] == [
        "entry point 'bad' of distribution 'bad-dist' 0.3 is not used: cannot be imported: "
        "its dependency 'no_such_dependency' is not installed"
    ]


def made_name(registry):
    return registry.select("scheduler_policy", ImplementationConfig(name="fcfs")).name


def test_plugin_module_that_is_missing_or_exits(folder):
    folder.distribution("gone-dist", "1", {"gone": "gone_mod"})
    folder.module("exits", "raise SystemExit('bye')")
    folder.distribution("exit-dist", "1", {"exits": "exits"})
    registry = Registry.discover()
    messages = {f.source.distribution: f.message for f in registry.failures}
    assert messages == {
        "gone-dist": "cannot be imported: module 'gone_mod' is not installed or not on the path",
        "exit-dist": "cannot be imported: SystemExit: bye",
    }


def test_selected_plugin_that_failed(folder):
    folder.module("bad_mod", "import no_such_dependency")
    folder.distribution("octavo-turbo", "0.3", {"turbo": "bad_mod"})
    registry = Registry.discover()
    with pytest.raises(PluginImportError) as caught:
        registry.select("scheduler_policy", ImplementationConfig(name="turbo"))
    assert str(caught.value) == (
        "scheduler.policy: scheduler_policy 'turbo' is not known, and a plugin that may offer it "
        "was not loaded: entry point 'turbo' of distribution 'octavo-turbo' 0.3 cannot be "
        "imported: its dependency 'no_such_dependency' is not installed"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    with pytest.raises(PluginNotFound, match=r"did you mean 'fcfs'\? \(not looked at, because not"):
        registry.select("scheduler_policy", ImplementationConfig(name="fcf"))


def test_hook_with_another_signature(folder):
    folder.module(
        "wrong_hook",
        """
        from octavo.core.contracts import hookimpl

        @hookimpl
        def octavo_samplers(config, extra=1):
            return []
        """,
    )
    folder.distribution("wrong-dist", "1", {"wrong": "wrong_hook"})
    registry = Registry.discover()
    (failure,) = registry.failures
    assert failure.message == (
        "hook octavo_samplers has another signature: expected octavo_samplers(), "
        "got octavo_samplers(config, extra=1)"
    )
    with pytest.raises(ContractError, match="module wrong_hook: hook octavo_samplers has another"):
        Registry.discover(load=["wrong_hook"], disable=["wrong"])


def test_hook_that_does_not_exist_raises_or_returns_nonsense(folder):
    head = "from octavo.core.contracts import hookimpl\n@hookimpl\n"
    folder.module("typo_hook", head + "def octavo_sampler(): return []\n")
    folder.module("raises_hook", head + "def octavo_samplers(): import no_such_dependency\n")
    folder.module("nonsense_hook", head + "def octavo_samplers(): return ['torch']\n")
    folder.module("none_hook", head + "def octavo_samplers(): return None\n")
    points = {name: name for name in ("typo_hook", "raises_hook", "nonsense_hook", "none_hook")}
    folder.distribution("many", "1", points)
    registry = Registry.discover()
    messages = {f.source.entry_point: f.message for f in registry.failures}
    assert messages == {
        "typo_hook": "there is no hook 'octavo_sampler'; did you mean 'octavo_samplers'?",
        "raises_hook": "hook octavo_samplers failed: its dependency 'no_such_dependency' is not "
        "installed",
        "nonsense_hook": "hook octavo_samplers returned list that holds 'torch', expected a list "
        "of Provider",
        "none_hook": "hook octavo_samplers returned NoneType, expected a list of Provider",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('name="odd", rank="x"', "rank must be int, got 'x'"),
        ('name="auto"', "name 'auto' is what the configuration says"),
        ('name="bad_name!"', "name 'bad_name!' must be lower case letters"),
        ("name=None", "name None must be lower case letters"),
    ],
)
def test_a_provider_that_is_none_is_broken_and_the_others_work(folder, arguments, message):
    body = f"""
    PROVIDER = Provider({arguments}, factory="odd:Policy")
    """
    folder.policy("odd", "fine", body)
    registry = Registry.discover()
    assert [failure.source.distribution for failure in registry.failures] == ["odd"]
    assert message in registry.failures[0].message
    assert registry.select(
        "scheduler_policy", ImplementationConfig(name="auto")
    ).registered.source.built_in


def test_entry_points_of_one_name_in_two_distributions(folder):
    for name in ("one", "two"):
        folder.module(f"of_{name}", POLICY_MODULE.format(name=name))
        folder.distribution(f"pack-{name}", "1", {"plugin": f"of_{name}"})
    known = Registry.discover().providers("scheduler_policy")
    assert (known["one"].distribution, known["two"].distribution) == ("pack-one", "pack-two")
    known = Registry.discover(disable=["pack-one"]).providers("scheduler_policy")
    assert "one" not in known
    assert known["two"].distribution == "pack-two"


def test_a_hook_that_fails_as_a_generator_stops_nobody_else(folder):
    folder.module(
        "lazy",
        "from octavo.core.contracts import hookimpl\n"
        "@hookimpl\ndef octavo_samplers():\n    yield from ()\n    raise KeyError('x')\n",
    )
    folder.distribution("lazy", "1", {"lazy": "lazy"})
    registry = Registry.discover()
    (failure,) = registry.failures
    assert "hook octavo_samplers failed: KeyError: 'x'" in failure.message
    assert "torch" in registry.providers("sampler")


POLICY_MODULE = """
from octavo.core.contracts import Provider, hookimpl

@hookimpl
def octavo_scheduler_policies():
    return [Provider(name="{name}", factory="nowhere:Policy")]
"""
