"""Which attention backend `auto` takes, with its reasons, and one backend a phase."""

from __future__ import annotations

import importlib.util

import pytest

from octavo.core.config.models import AUTO
from octavo.core.contracts import Platform, ProbeContext
from octavo.core.errors import PluginNotFound, PluginOptionsError
from octavo.core.registry import Registry
from octavo.engine.choices import check_choices
from octavo.engine.resolve import Machine, resolve
from octavo.frontend.config import load_config
from octavo.server.command_line.config_yaml import config_yaml
from octavo.testing.device_attention import attention_spec

CPU = Machine(Platform("cpu"), "a test", 2, "a test")
HOPPER = Platform("cuda", (9, 0))


@pytest.fixture(scope="module")
def registry():
    return Registry.discover()


def chosen(registry, platform, **facts):
    """(name, why not the others)"""
    facts = {"dtype": "bfloat16", "kv_dtype": "bfloat16", "block_size": 16, **facts}
    size = facts.pop("size", 128)
    facts["attention_specs"] = (attention_spec(8, 2, size), attention_spec(8, 2, size, window=9))
    selection = registry.select("attention_backend", AUTO, ProbeContext(platform, facts))
    return selection.name, dict(selection.rejected)


@pytest.fixture
def installed(registry):
    for package in ("flashinfer", "triton"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return registry


@pytest.mark.parametrize(
    ("platform", "facts", "name", "reasons"),
    [
        (HOPPER, {}, "flashinfer", {"triton": "rank 10", "flex": "only when named"}),
        (HOPPER, {"kv_dtype": "fp8"}, "flashinfer", {}),
        (
            HOPPER,
            {"size": 80},
            "triton",
            {"flashinfer": "sizes 64, 128, 256, not 80"},
        ),
        (HOPPER, {"dtype": "float32"}, "triton", {"flashinfer": "the model's dtype is float32"}),
        (HOPPER, {"size": 80, "block_size": 4}, "torch", {"triton": "not 4"}),
        (
            HOPPER,
            {"size": 512},
            "torch",
            {"flashinfer": "not 512", "triton": "is above 256"},
        ),
        (
            Platform("cuda", (7, 5)),
            {"dtype": "float16", "kv_dtype": "float16"},
            "torch",
            {"flashinfer": "capability 8.0, this device has 7.5", "triton": "has 7.5"},
        ),
    ],
)
def test_auto_on_cuda(installed, platform, facts, name, reasons):
    found, rejected = chosen(installed, platform, **facts)
    assert found == name
    for other, reason in reasons.items():
        assert reason in rejected[other]


def test_phases_are_settled_and_shown(registry):
    attention = {"prefill": {"name": "flex", "compile": False}, "decode": "torch"}
    config = load_config(mapping={"attention": attention})
    resolved = resolve(config, registry, CPU, need_model=False)
    assert resolved.selections["attention_backend"].name == "torch"
    assert resolved.prefill_attention.name == "flex"
    assert resolved.prefill_attention.options.compile is False
    runner = resolved.selections["graph_runner"]
    assert runner.name == "eager"
    assert "flex for prefill, torch for decode" in dict(runner.rejected)["native"]
    assert resolved.reasons["attention.prefill"] == "named in the configuration"
    text = config_yaml(resolved)
    assert "  prefill: {name: flex, compile: false}  # named in the configuration" in text
    assert "  decode: torch  # named in the configuration" in text


def test_a_phase_that_is_not_named_takes_the_backend(registry):
    config = load_config(mapping={"attention": {"backend": "torch", "prefill": "flex"}})
    resolved = resolve(config, registry, CPU, need_model=False)
    assert resolved.selections["attention_backend"].name == "torch"
    assert resolved.prefill_attention.name == "flex"
    config = load_config(mapping={"attention": {"backend": "torch", "decode": "auto"}})
    resolved = resolve(config, registry, CPU, need_model=False)
    assert resolved.reasons["attention.decode"].startswith("the best that is available")
    same = load_config(mapping={"attention": {"backend": "torch", "prefill": "torch"}})
    assert resolve(same, registry, CPU, need_model=False).prefill_attention is None


def test_mistakes_in_a_phase_are_refused_with_its_key(registry):
    unknown = load_config(mapping={"attention": {"decode": "tritn"}})
    with pytest.raises(PluginNotFound, match=r"attention\.decode.*'tritn'.*did you mean 'triton'"):
        check_choices(unknown, registry)
    wrong = load_config(mapping={"attention": {"prefill": {"name": "flex", "compil": True}}})
    with pytest.raises(PluginOptionsError, match=r"attention\.prefill\.compil"):
        check_choices(wrong, registry)
