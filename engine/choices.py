"""Checks the implementations that a configuration names, before anything is resolved."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.config.models import ImplementationConfig
from octavo.core.config.origin import Path
from octavo.core.contracts import KINDS
from octavo.core.errors import ConfigError, OctavoError, PluginError
from octavo.core.registry import Registry
from octavo.engine.config import PHASES, EngineConfig


def check_choices(config: EngineConfig, registry: Registry) -> None:
    """Raise for an implementation that is named and unknown, or whose options do not validate.
    Whether it can be used here is not asked."""
    for error in choice_errors(config, registry):
        raise error


def choice_errors(config: EngineConfig, registry: Registry) -> Iterator[OctavoError]:
    """Every choice that `check_choices` raises for."""
    for kind in KINDS.values():
        section, _, name = kind.config_path.partition(".")
        if section not in type(config).model_fields:
            continue
        value = getattr(config, section)
        choices: list[tuple[Path, ImplementationConfig]] = []
        if not name:
            choices = [((section, index), choice) for index, choice in enumerate(value)]
        elif name in value.model_fields_set and getattr(value, name) is not None:
            choices = [((section, name), getattr(value, name))]
        if section == "attention":
            phases = ((("attention", phase), getattr(value, phase)) for phase in PHASES)
            choices += [(path, choice) for path, choice in phases if choice is not None]
        for path, choice in choices:
            try:
                registry.check(kind.name, choice, path=path, origin=config.origin)
            except (ConfigError, PluginError) as error:
                yield error
