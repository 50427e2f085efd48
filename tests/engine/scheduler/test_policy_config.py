"""`scheduler.policy` as a name, a mapping, or a list that composes."""

from __future__ import annotations

import pytest
import yaml

from octavo.core.errors import ConfigError, PluginError
from octavo.core.registry import Registry
from octavo.engine.choices import check_choices
from octavo.engine.resolve import resolve
from octavo.frontend.config import load_config
from octavo.server.command_line.config_schema import config_schema
from octavo.server.command_line.config_yaml import config_yaml

LIST = ["priority", {"name": "fair", "weights": {"gold": 3, "free": 1}}]


@pytest.fixture(scope="module")
def registry():
    return Registry.discover(only=[])


def load(policy):
    return load_config(mapping={"scheduler": {"policy": policy}})


def test_a_list_is_a_composition_and_shown_as_one(registry):
    resolved = resolve(load(LIST), registry, need_model=False)
    selection = resolved.selections["scheduler_policy"]
    assert [choice.name for choice in selection.options.choices()] == ["priority", "fair"]
    shown = yaml.safe_load(config_yaml(resolved))
    assert shown["scheduler"]["policy"] == LIST
    assert load(shown["scheduler"]["policy"]) == load(LIST)


def test_a_list_of_one_is_that_policy():
    assert load(["sjf"]) == load("sjf")
    assert load_config(overrides=["scheduler.policy=[priority, fair]"]).scheduler == (
        load(["priority", "fair"]).scheduler
    )


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (["priority", "fare"], r"scheduler.policy\[1\]: there is no scheduler_policy 'fare'"),
        (["priority", {"name": "fair", "weight": 1}], r"policy\[1\].weight: unknown option"),
        (["priority", {"name": "fair", "weights": {"a": -1}}], "weights greater than 0"),
    ],
)
def test_every_part_is_checked_before_anything_starts(registry, policy, message):
    with pytest.raises(PluginError, match=message):
        check_choices(load(policy), registry)
    with pytest.raises(PluginError, match=message):
        resolve(load(policy), registry, need_model=False)


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match=r"scheduler.policy: expected a policy, or a non-empty"):
        load([])


def test_the_schema_knows_lists(registry):
    forms = config_schema(registry)["$defs"]["scheduler_policy"]["anyOf"]
    items = {"$ref": "#/$defs/scheduler_policy"}
    assert {"type": "array", "items": items, "minItems": 1} in forms
