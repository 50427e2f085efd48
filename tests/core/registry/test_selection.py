"""Choosing an implementation: by name, by `auto`, by what the user handed over."""

from __future__ import annotations

import pytest
from pydantic import Field

from octavo.core.config import ImplementationConfig, Origin
from octavo.core.contracts import (
    KINDS,
    Availability,
    Options,
    Platform,
    ProbeContext,
    Provider,
)
from octavo.core.contracts.sampler import Sampler
from octavo.core.contracts.scheduler_policy import SchedulerPolicy
from octavo.core.errors import (
    ContractError,
    PluginConflict,
    PluginError,
    PluginImportError,
    PluginNotFound,
    PluginOptionsError,
    PluginUnavailable,
)
from octavo.core.registry import Registry

AUTO = ImplementationConfig(name="auto")


class Plain(SchedulerPolicy):
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


class Handed(Sampler):
    """A sampler that the user handed over."""

    def sample(self, logits, batch):
        return None

    def logprobs(self, logits, token_ids, num):
        return None


def hook_module(folder, providers, *, module="offers", dist="acme", version="1.0"):
    """A distribution whose hook returns `providers`, given as source text."""
    folder.module(
        module,
        f"""
        from octavo.core.contracts import *
        from octavo.core.contracts import hookimpl

        @hookimpl
        def octavo_samplers():
            return {providers}
        """,
    )
    folder.distribution(dist, version, {dist: module})


def third_party(folder, providers, **kwargs):
    """A registry in which a sampler's only competitors are built-ins."""
    hook_module(folder, providers, **kwargs)
    return Registry.discover(disable=["octavo-plugins", "octavo-backends"])


# ---- by name ------------------------------------------------------------------------------------


def test_unknown_name_suggests_the_nearest(folder):
    with pytest.raises(PluginNotFound) as caught:
        Registry.discover().select("scheduler_policy", ImplementationConfig(name="fcsf"))
    assert str(caught.value) == (
        "scheduler.policy: there is no scheduler_policy 'fcsf'; did you mean 'fcfs'?"
    )
    assert (caught.value.kind, caught.value.name) == ("scheduler_policy", "fcsf")


def test_unknown_kind():
    with pytest.raises(
        PluginError, match="there is no plugin kind 'samplers'; did you mean 'sampl"
    ):
        Registry.discover().select("samplers", AUTO)


def test_two_plugins_offering_one_name(folder):
    folder.policy("acme-one", "same")
    folder.policy("acme-two", "same", version="2.0")
    registry = Registry.discover()
    assert registry.select("scheduler_policy", ImplementationConfig(name="fcfs")).name == "fcfs"
    (pair,) = registry.conflicts()
    assert [entry.distribution for entry in pair] == ["acme-one", "acme-two"]
    with pytest.raises(PluginConflict) as caught:
        registry.select("scheduler_policy", ImplementationConfig(name="same"))
    assert str(caught.value) == (
        "scheduler_policy 'same' is offered by several plugins: entry point 'acme-one' of "
        "distribution 'acme-one' 1.0 and entry point 'acme-two' of distribution 'acme-two' 2.0; "
        "put one of them into plugins.disable"
    )


def test_auto_passes_over_a_name_in_conflict(folder):
    hook_module(folder, "[Provider(name='a', factory='x:Y', rank=9)]", module="m1", dist="d1")
    hook_module(folder, "[Provider(name='a', factory='x:Y', rank=9)]", module="m2", dist="d2")
    hook_module(folder, "[Provider(name='b', factory='x:Y', rank=1)]", module="m3", dist="d3")
    selection = Registry.discover(disable=["octavo"]).select("sampler", AUTO)
    assert selection.name == "b"
    assert selection.rejected == (("a", "several plugins offer this name"),)


def test_wrong_contract_version(folder):
    registry = third_party(
        folder,
        "[Provider(name='old', factory='x:Y', contract_version='2'), "
        "Provider(name='good', factory='x:Y')]",
        version="1.5",
    )
    with pytest.raises(ContractError) as caught:
        registry.select("sampler", ImplementationConfig(name="old"))
    message = (
        "sampler 'old' (entry point 'acme' of distribution 'acme' 1.5) was written for version '2' "
        f"of its contract, this Octavo has version '{KINDS['sampler'].version}'"
    )
    assert str(caught.value) == message
    selection = registry.select("sampler", AUTO)
    assert selection.name == "good"
    assert ("old", message) in selection.rejected


@pytest.mark.parametrize(
    ("theirs", "ours", "good"),
    [
        ("0", "0", True),
        ("0", "1", False),
        ("1", "0", False),
        ("0.1", "0.2", False),
        ("1", "1.2", True),
        ("1.2", "1.2", True),
        ("1.3", "1.2", False),
        ("2", "1.2", False),
        ("x", "1", False),
    ],
)
def test_version_compatibility(theirs, ours, good):
    from octavo.core.contract_checks import _compatible

    assert (theirs == ours or _compatible(theirs, ours)) is good


# ---- availability -------------------------------------------------------------------------------


def test_requirements_come_before_the_probe(folder):
    registry = third_party(
        folder,
        """[
            Provider(name='pkg', factory='x:Y', probe='no_such_mod:probe', requires=(
                Requirement(package='no_such_pkg', extra='flashinfer'),)),
            Provider(name='dev', factory='x:Y', requires=(Requirement(devices=('cuda',)),)),
            Provider(name='cap', factory='x:Y', requires=(Requirement(capability=(8, 0)),)),
            Provider(name='good', factory='x:Y', requires=(Requirement(package='json'),)),
        ]""",
    )
    selection = registry.select("sampler", AUTO)
    assert selection.name == "good"
    assert selection.reason == "the best that is available (rank 0)"
    assert dict(selection.rejected) == {
        "pkg": "package 'no_such_pkg' is not installed (pip install 'octavo[flashinfer]')",
        "dev": "needs device cuda, this is cpu",
        "cap": "needs CUDA compute capability 8.0, this device has none",
    }
    gpu = ProbeContext(Platform("cuda", (7, 5)))
    rejected = dict(registry.select("sampler", AUTO, gpu).rejected)
    assert rejected["cap"] == "needs CUDA compute capability 8.0, this device has 7.5"
    with pytest.raises(
        PluginUnavailable,
        match=r"sampler\.backend: sampler 'dev' cannot be used here: needs device cuda, this is c",
    ):
        registry.select("sampler", ImplementationConfig(name="dev"))


def test_probes(folder):
    folder.module(
        "probes",
        """
        from octavo.core.contracts import Availability
        def crash(ctx): raise RuntimeError("no such register")
        def no(ctx): return Availability(False, "head size 7 is odd")
        def nonsense(ctx): return True
        def yes(ctx): return Availability(True, "with AVX2")
        """,
    )
    registry = third_party(
        folder,
        """[
            Provider(name=n, factory='x:Y', probe=f'probes:{n}', rank=r)
            for r, n in enumerate(['yes', 'crash', 'no', 'nonsense', 'absent'])
        ]""",
    )
    selection = registry.select("sampler", AUTO)
    assert (selection.name, selection.reason) == (
        "yes",
        "the best that is available (rank 0): with AVX2",
    )
    rejected = dict(selection.rejected)
    assert rejected["crash"] == "its probe failed: RuntimeError: no such register"
    assert rejected["no"] == "head size 7 is odd"
    assert rejected["nonsense"] == "its probe returned bool, expected Availability"
    assert rejected["absent"] == "its probe 'probes:absent': module 'probes' has no 'absent'"


def test_a_probe_sees_the_facts():
    seen = {}

    def probe(ctx):
        seen.update(ctx.facts)
        return Availability(ctx.facts.get("dtype") == "float32")

    pair = ("sampler", Provider(name="mine", factory=Handed, probe=probe))
    registry = Registry.discover(objects=[pair])
    ctx = ProbeContext(facts={"dtype": "float32"})
    assert registry.select("sampler", ImplementationConfig(name="mine"), ctx).name == "mine"
    assert seen == {"dtype": "float32"}


def test_auto_by_rank(folder):
    registry = third_party(
        folder,
        "[Provider(name=n, factory='x:Y', rank=r) "
        "for n, r in [('low', 1), ('high', 5), ('never', -1)]]",
    )
    selection = registry.select("sampler", AUTO)
    assert selection.name == "high"
    assert dict(selection.rejected) == {"low": "rank 1, below 'high'", "never": "only when named"}
    assert (
        registry.select("sampler", ImplementationConfig(name="never")).reason
        == "named in the configuration"
    )


def test_nothing_available(folder):
    registry = third_party(
        folder, "[Provider(name='dev', factory='x:Y', requires=(Requirement(devices=('cuda',)),))]"
    )
    with pytest.raises(PluginUnavailable) as caught:
        registry.select("sampler", AUTO)
    assert str(caught.value) == (
        "sampler.backend: no sampler can be used here: dev: needs device cuda, this is cpu"
    )
    with pytest.raises(PluginUnavailable, match="no sampler can be used here: none is registered"):
        Registry.discover(only=[], disable=["octavo"]).select("sampler", AUTO)


# ---- what the user handed over ------------------------------------------------------------------


def test_an_object_goes_before_a_default_and_auto():
    registry = Registry.discover(objects=[Plain, Handed])
    default = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"), explicit=False)
    assert default.name == "plain"
    assert default.reason.startswith("given by the user (class ")
    assert ("fcfs", "'plain' was given by the user") in default.rejected
    assert registry.select("scheduler_policy", AUTO).name == "plain"
    assert registry.select("scheduler_policy", ImplementationConfig(name="fcfs")).name == "fcfs"
    assert registry.select("sampler", AUTO).name == "handed"


def test_two_objects_for_one_place_must_be_told_apart():
    class Second(Plain):
        pass

    registry = Registry.discover(objects=[Plain, Second])
    with pytest.raises(
        PluginConflict,
        match=r"scheduler_policy: both 'plain' \(.*\) and 'second' \(.*\) were given; name one of "
        r"them as scheduler\.policy",
    ):
        registry.select("scheduler_policy", AUTO)
    assert registry.select("scheduler_policy", ImplementationConfig(name="second")).name == "second"


def test_an_object_shadows_a_built_in_of_its_name():
    class Mine(Plain):
        name = "fcfs"

    registry = Registry.discover(objects=[Mine])
    assert not registry.conflicts()
    selection = registry.select("scheduler_policy", ImplementationConfig(name="fcfs"))
    assert type(registry.create(selection, None)) is Mine


# ---- options ------------------------------------------------------------------------------------


class FairOptions(Options):
    weights: dict[str, float] = Field(default_factory=dict, description="Share by user.")
    quantum: int = Field(default=1, gt=0, description="Tokens.")


class Fair(Plain):
    Options = FairOptions

    def __init__(self, options, context):
        self.options = options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weigths": {}},
            "scheduler.policy.weigths: unknown option; did you mean 'weights'? "
            "[options of scheduler_policy 'fair']",
        ),
        (
            {"weights": {"gold": "x"}},
            "scheduler.policy.weights.gold: expected a number, got 'x' "
            "[options of scheduler_policy 'fair']",
        ),
        (
            {"quantum": 0},
            "scheduler.policy.quantum: expected a number > 0, got 0 "
            "[options of scheduler_policy 'fair']",
        ),
        (
            {"quantum": [1], "weights": 3},
            "scheduler.policy.weights: expected a mapping, got 3 (and 1 more) "
            "[options of scheduler_policy 'fair']",
        ),
    ],
)
def test_options_that_do_not_validate(options, message):
    registry = Registry.discover(objects=[Fair])
    with pytest.raises(PluginOptionsError) as caught:
        registry.select("scheduler_policy", ImplementationConfig(name="fair", options=options))
    assert str(caught.value) == message


def test_options_errors_have_file_and_line():
    origin = Origin()
    origin.update({("scheduler",): 1, ("scheduler", "policy"): 2}, "engine.yaml")
    origin.update({("scheduler", "policy", "quantum"): 4}, "engine.yaml")
    registry = Registry.discover(objects=[Fair])
    choice = ImplementationConfig(name="fair", options={"quantum": "many"})
    with pytest.raises(
        PluginOptionsError, match=r"^engine\.yaml:4: scheduler\.policy\.quantum: expected an integ"
    ):
        registry.select("scheduler_policy", choice, origin=origin)


def test_options_arrive_in_the_factory():
    registry = Registry.discover(objects=[Fair])
    choice = ImplementationConfig(name="fair", options={"weights": {"gold": 3}})
    policy = registry.create(registry.select("scheduler_policy", choice), None)
    assert policy.options == FairOptions(weights={"gold": 3.0})


def test_options_for_what_has_none():
    registry = Registry.discover(objects=[Plain])
    choice = ImplementationConfig(name="plain", options={"a": 1})
    with pytest.raises(PluginOptionsError, match=r"unknown option; there are none \[options of"):
        registry.select("scheduler_policy", choice)


def test_options_model_that_cannot_be_imported_or_is_none(folder):
    registry = third_party(
        folder,
        "[Provider(name='a', factory='x:Y', options='no_such_mod:Options'), "
        "Provider(name='b', factory='x:Y', options='json:dumps')]",
    )
    with pytest.raises(
        PluginImportError, match=r"sampler 'a' .* its options model 'no_such_mod:Options' cannot be"
    ):
        registry.select("sampler", ImplementationConfig(name="a"))
    with pytest.raises(ContractError, match=r"its options model is <function dumps.* subclass of"):
        registry.select("sampler", ImplementationConfig(name="b"))
