"""Whose fault an exception is, what plugins cost, and the trace of hooks."""

from __future__ import annotations

import logging
import sys
import time

import pytest
import torch

from octavo.backends.attention.torch_attention import TorchAttention
from octavo.core import envvars
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import KVLayout
from octavo.core.contracts.logits_processor import DeviceLogitsProcessor
from octavo.core.contracts.observer import Observer
from octavo.core.contracts.sampler import SampledTokens
from octavo.core.errors import ConfigError, EngineDeadError, PluginError, PluginFault
from octavo.core.registry import Registry
from octavo.frontend.client import InlineClient
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy
from octavo.testing.conformance.engine_run import tiny_model
from octavo.testing.fake_engine import Collector
from octavo.testing.tiny_model import generate, make_engine, make_requests


class Crashing(FcfsPolicy):
    name = "crashing"

    def __init__(self, options: NoOptions, context):
        super().__init__(options, context)

    def pop(self):
        raise ZeroDivisionError("planted")


class CrashingSampler(TorchSampler):
    name = "crashing_sampler"

    def sample(self, logits, batch):
        return logits.no_such_attribute


class LyingManager(PagedKVCacheManager):
    name = "lying_manager"

    def admit(self, slot, digest, match, total):
        return super().admit(slot, digest, None, total)


def policy(**methods):
    """A policy of which some methods do something else."""
    return type("Wrong", (Crashing,), {"name": "wrong", "pop": FcfsPolicy.pop, **methods})


def sampler(found):
    """A sampler that returns something else."""
    return type("WrongSampler", (TorchSampler,), {"name": "wrong", "sample": found})


def sampled(token_ids):
    return lambda self, logits, batch: SampledTokens(
        torch.tensor(token_ids), torch.ones(len(token_ids), dtype=torch.bool)
    )


def run(client):
    client.add(make_requests(1))
    while client.has_work():
        client.step()


def leave(*args):
    sys.exit(3)


@pytest.fixture
def engine():
    engines = []

    def make(config, plugins=()):
        engines.append(make_engine(tiny_model(), config, plugins))
        return engines[-1]

    yield make
    for made in engines:
        made.close()


@pytest.mark.parametrize(
    ("plugin", "kind", "message"),
    [
        (Crashing, "scheduler_policy", "ZeroDivisionError: planted"),
        (CrashingSampler, "sampler", "AttributeError: 'Tensor' object"),
        (LyingManager, "kv_cache_manager", "AttributeError: 'NoneType' object"),
    ],
)
def test_the_name_of_what_failed_comes_first(engine, plugin, kind, message):
    made = engine({}, [plugin])
    made.add(make_requests(1)[0])
    message = rf"^{kind} '{plugin.name}' \(.* failed: {message}"
    with pytest.raises(PluginFault, match=message) as caught:
        generate(made, [])
    assert (caught.value.kind, caught.value.name) == (kind, plugin.name)


def test_an_engine_that_died_says_whose_fault_it_was(engine):
    client = InlineClient(engine({}, [Crashing]))
    client.add(make_requests(1))
    message = r"^scheduler_policy 'crashing' .*; the engine stopped$"
    with pytest.raises(EngineDeadError, match=message):
        client.step()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (policy(add=lambda self, request: 1 / 0), "ZeroDivisionError: division by zero"),
        (policy(pop=lambda self: sys.exit(3)), "SystemExit: 3"),
        (policy(pop=lambda self: None), "Wrong.pop returned None, expected the request that peek"),
        (policy(peek=lambda self: 5), "Wrong.peek returned 5, expected a request that waits"),
        (
            policy(admit_cap=lambda self, request, want: "x"),
            "Wrong.admit_cap returned 'x', expected an integer",
        ),
        (sampler(lambda self, logits, batch: None), "it returned NoneType, expected SampledTokens"),
        (sampler(lambda self, logits, batch: logits), "it returned Tensor, expected SampledTokens"),
        (sampler(sampled([1, 2])), r"it returned .* \[\[2\], \[2\]\], expected .* int64\[1\]"),
        (sampler(sampled([-1])), "it drew token id -1, expected 0 to"),
        (sampler(sampled([10**9])), "it drew token id 1000000000, expected 0 to"),
    ],
)
def test_what_comes_back_is_checked_and_its_author_named(engine, plugin, message):
    client = InlineClient(engine({}, [plugin]))
    with pytest.raises(EngineDeadError, match=rf"'wrong'.* failed: {message}"):
        run(client)


def test_processors_that_leave_fail_their_requests_and_observers_nothing(engine, caplog):
    leaving = type(
        "Leaving",
        (DeviceLogitsProcessor,),
        {"name": "leaving", "attach": leave, "apply": leave, "detach": leave},
    )
    watching = type("Watching", (Observer,), {"name": "watching", "on_step": leave})
    made = engine(
        {"logits_processors": ["leaving"], "observers": ["watching"]},
        [leaving, watching],
    )
    made.add(make_requests(1)[0])
    collector = Collector(made).run()
    assert set(collector.codes.values()) == {"internal_error"}
    assert "logits processor 'leaving' failed: SystemExit: 3" in caplog.text
    assert "observer 'watching' failed" in caplog.text


def test_a_processor_that_reshapes_the_logits_is_named(engine):
    class Reshaping(DeviceLogitsProcessor):
        name = "reshaping"

        def attach(self, request):
            return True

        def apply(self, logits, slots, rows):
            logits.resize_(1, 7)

        def detach(self, slot):
            pass

    made = engine({"logits_processors": ["reshaping"]}, [Reshaping()])
    made.add(make_requests(1)[0])
    with pytest.raises(PluginFault, match=r"^logits processor 'reshaping' .*\[1, 7\], expected"):
        generate(made, [])


def test_a_layout_that_is_none_is_refused_with_its_backend(engine):
    class Odd(TorchAttention):
        name = "odd"

        def kv_layouts(self, spec):
            return [KVLayout(("N", "kv", "token", "head", "dim"))]

    with pytest.raises(PluginError, match=r"attention_backend 'odd': its KVLayout has dims \('N'"):
        engine({}, [Odd])


def test_an_error_outside_of_plugins_names_none(engine, monkeypatch):
    made = engine({})
    monkeypatch.setattr(made.scheduler, "plan", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.step()


class Slow(FcfsPolicy):
    name = "slow"

    def pop(self):
        time.sleep(0.02)
        return super().pop()


def test_time_is_attributed_to_plugins(engine):
    config = {"observability": {"plugin_times": True}, "sampler": {"backend": "torch"}}
    made = engine(config, [Slow])
    generate(made, make_requests(4))
    times = made.metrics()["plugin_times"]
    slow = times["scheduler_policy slow"]
    assert slow["seconds"] >= 4 * 0.02
    assert slow["calls"] >= 8
    assert times["kv_cache_manager paged"]["calls"] > 0
    assert times["sampler torch"]["seconds"] > 0
    assert generate(engine({}, [Slow]), make_requests(4)) == generate(
        engine({"observability": {"plugin_times": True}}), make_requests(4)
    )


def test_times_cost_nothing_unless_they_are_asked_for(engine):
    made = engine({})
    assert made.metrics()["plugin_times"] == {}
    assert "peek" not in vars(made.scheduler.policy)


def test_an_observer_that_fails_is_named_logged_once_and_counted(engine, caplog):
    from octavo.core.contracts.observer import Observer

    class Failing(Observer):
        name = "failing"

        def on_step(self, record):
            raise KeyError("planted")

    with caplog.at_level(logging.ERROR):
        made = engine({"observers": ["failing"]}, [Failing])
        tokens = generate(made, make_requests(3))
    assert all(len(item) == 10 for item in tokens)
    assert made.metrics()["observer_failures"]["failing"] > 3
    assert caplog.text.count("observer 'failing' failed") == 1


def test_hooks_are_traced_when_asked(monkeypatch, capsys):
    Registry.discover()
    assert "octavo hook" not in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_TRACE_HOOKS", "1")
    Registry.discover()
    traced = capsys.readouterr().err
    assert "octavo hook octavo_samplers: calling entry point 'octavo-plugins'" in traced
    assert "octavo hook octavo_samplers: entry point" in traced
    assert "offers torch" in traced
    monkeypatch.setenv("OCTAVO_TRACE_HOOKS", "yes")
    with pytest.raises(ConfigError, match="OCTAVO_TRACE_HOOKS: expected 0 or 1, got 'yes'"):
        envvars.TRACE_HOOKS.get()
