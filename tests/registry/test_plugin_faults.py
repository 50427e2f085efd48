"""Whose fault an exception is, what plugins cost, and the trace of hooks."""

from __future__ import annotations

import logging
import time

import pytest

from octavo.core import envvars
from octavo.core.client import InlineClient
from octavo.core.contracts import NoOptions
from octavo.core.errors import ConfigError, EngineDeadError, PluginFault
from octavo.core.registry import Registry
from octavo.core.testing.conformance.engine_run import tiny_model
from octavo.core.testing.tiny_model import generate, make_engine, make_requests
from octavo.plugins.kv_cache_managers.paged import PagedKVCacheManager
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.plugins.scheduler_policies.fcfs import FcfsPolicy


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
