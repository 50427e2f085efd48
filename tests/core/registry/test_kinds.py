"""Kinds that packages declare: a hook specification, a section of their own, providers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.core.config import load_config
from octavo.core.contracts import KINDS
from octavo.core.errors import ConfigError, ContractError, PluginNotFound
from octavo.core.registry import Registry
from octavo.engine.config import EngineConfig
from octavo.engine.resolve import resolve

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add-a-kind.md"
CODE = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
CONTRACT, CONFIG = CODE["acme/__init__.py"], CODE["acme/config.py"]
SHORTEST = CODE["other_rerankers.py"]


def write_acme(folder):
    (folder.path / "acme").mkdir()
    (folder.path / "acme" / "__init__.py").write_text(CONTRACT)
    (folder.path / "acme" / "config.py").write_text(CONFIG)
    folder.module("other_rerankers", SHORTEST)


@pytest.fixture
def acme(folder):
    """The packages of docs/add-a-kind.md; the one that implements the kind is found first."""
    write_acme(folder)
    folder.distribution("acme", "1.0", {"acme": "acme"})
    points = folder.path / "acme-1.0.dist-info" / "entry_points.txt"
    points.write_text(points.read_text() + "[octavo.config]\nacme = acme.config:Config\n")
    folder.distribution("aaa-rerankers", "1.0", {"aaa": "other_rerankers"})
    return folder


def test_a_third_party_adds_a_kind_and_another_implements_it(acme):
    registry = Registry.discover()
    assert not registry.failures
    assert [*KINDS] == [*registry.kinds][: len(KINDS)]
    kind = registry.kinds["reranker"]
    assert (kind.hook, kind.module.__name__) == ("acme_rerankers", "acme")

    mapping = {"acme": {"reranker": {"name": "shortest", "limit": 2}}}
    config = load_config(EngineConfig, mapping=mapping)
    resolved = resolve(config, registry, need_model=False)
    selection = resolved.selections["reranker"]
    reranker = registry.create(selection, kind.context())
    assert reranker.order("x", ["ccc", "a", "bb"]) == ["a", "bb"]
    assert resolved.reasons["acme.reranker"] == "named in the configuration"
    assert selection.registered.distribution == "aaa-rerankers"


def test_the_section_is_checked_like_the_engine_s(acme):
    with pytest.raises(ConfigError, match=r"acme\.rerankr: unknown key; did you mean 'reranker'"):
        load_config(EngineConfig, mapping={"acme": {"rerankr": "shortest"}})
    config = load_config(EngineConfig, mapping={"acme": {"reranker": "shortes"}})
    with pytest.raises(PluginNotFound, match=r"acme\.reranker: there is no reranker 'shortes'"):
        resolve(config, Registry.discover(), need_model=False)


def test_implementations_are_held_to_the_contract_of_their_kind(acme):
    acme.module(
        "bad_rerankers",
        SHORTEST.replace("def order(self, query, documents)", "def order(self, documents)")
        .replace('name="shortest"', 'name="short"')
        .replace("other_rerankers", "bad_rerankers"),
    )
    registry = Registry.discover(load=["bad_rerankers"])
    selection = registry.select("reranker", load_choice("short"))
    with pytest.raises(
        ContractError, match=r"Shortest\.order has another signature: expected \(query, documents\)"
    ):
        registry.create(selection, None)


def load_choice(name):
    return load_config(EngineConfig, mapping={"acme": {"reranker": name}}).acme.reranker


def test_a_hook_that_came_before_its_kind_is_checked_when_the_kind_is_known(acme):
    acme.module("wrong", SHORTEST.replace("def acme_rerankers()", "def acme_rerankers(config)"))
    acme.distribution("aab", "1", {"aab": "wrong"})
    (failure,) = Registry.discover().failures
    assert failure.message == (
        "hook acme_rerankers has another signature: expected acme_rerankers(), "
        "got acme_rerankers(config)"
    )


def test_without_its_package_the_kind_is_unknown(acme):
    registry = Registry.discover(disable=["acme"])
    assert "reranker" not in registry.kinds
    (failure,) = registry.failures
    assert failure.message.startswith("there is no hook 'acme_rerankers'; ")


def test_a_module_that_is_named_declares_kinds_too(folder):
    write_acme(folder)
    registry = Registry.discover(load=["other_rerankers", "acme"])
    assert list(registry.providers("reranker")) == ["shortest"]


def test_a_kind_that_is_taken_or_none_is_refused(folder):
    head = "from octavo.core.contracts import KINDS, hookimpl\n@hookimpl\ndef octavo_kinds(): "
    folder.module("twice", head + "return [KINDS['sampler']]\n")
    folder.module("nonsense", head + "return ['sampler']\n")
    folder.distribution("both", "1", {"twice": "twice", "nonsense": "nonsense"})
    messages = {f.source.entry_point: f.message for f in Registry.discover().failures}
    assert messages == {
        "twice": "kind 'sampler' (octavo_samplers) is declared already",
        "nonsense": "hook octavo_kinds returned 'sampler', expected a list of Kind",
    }


def test_a_kind_without_one_hook_specification_is_refused(folder):
    folder.module(
        "empty",
        "from octavo.core.contracts import KINDS, Kind, hookimpl\n"
        "class Spec:\n    def acme_things(self): ...\n"
        "@hookimpl\ndef octavo_kinds():\n"
        "    return [Kind('thing', Spec, object, object, 'acme.thing')]\n",
    )
    folder.distribution("empty", "1", {"empty": "empty"})
    (failure,) = Registry.discover().failures
    assert "its spec must have one function, marked @octavo.core.contracts.hookspec" in str(
        failure.message
    )


def test_a_bad_hook_of_a_named_file_is_its_own_fault_not_the_servers(folder):
    folder.module(
        "bad_routes",
        "from octavo.core.contracts import hookimpl\n"
        "@hookimpl\ndef octavo_routes(registry): return []\n",
    )
    with pytest.raises(ContractError, match=r"module bad_routes: hook octavo_routes has another"):
        Registry.discover(load=["bad_routes"])
