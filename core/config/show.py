"""A resolved configuration as YAML, with comments that say what `auto` chose and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel, SecretStr

from octavo.core.config.models import COMPOSED, EngineConfig, ImplementationConfig
from octavo.core.config.resolve import Resolved
from octavo.core.contracts import KINDS

HIDDEN = "**********"
"""Stands for a secret."""


def config_yaml(resolved: Resolved) -> str:
    """YAML that loads to the resolved configuration."""
    lines: list[str] = []
    for section in type(resolved.config).model_fields:
        value = getattr(resolved.config, section)
        if isinstance(value, BaseModel):
            lines.append(f"{section}:")
            for name in type(value).model_fields:
                key = f"{section}.{name}"
                lines.append(_line(f"  {name}", getattr(value, name), resolved.reasons.get(key)))
                lines += [f"    # {text}" for text in _rejected(resolved, key)]
        elif value:
            lines.append(f"{section}:")
            for index, item in enumerate(value):
                lines.append(_line("  -", item, resolved.reasons.get(f"{section}[{index}]"), ""))
        else:
            lines.append(f"{section}: []")
    return "\n".join(lines) + "\n"


def given_yaml(config: EngineConfig) -> str:
    """YAML of what was given, nothing decided and no default added."""
    lines: list[str] = []
    for section in EngineConfig.model_fields:
        value = getattr(config, section)
        if isinstance(value, BaseModel):
            names = [name for name in type(value).model_fields if name in value.model_fields_set]
            lines += [f"{section}:"] * bool(names)
            lines += [_line(f"  {name}", getattr(value, name), None) for name in names]
        elif value:
            lines.append(f"{section}: {_flow(plain(value))}")
    return "\n".join(lines or ["{}"]) + "\n"


def _line(name: str, value: Any, reason: str | None, colon: str = ":") -> str:
    text = f"{name}{colon} {_flow(plain(value))}"
    return f"{text}  # {reason}" if reason else text


def plain(value: Any) -> Any:
    """A value as YAML writes it: a choice without options is its name."""
    if isinstance(value, ImplementationConfig):
        if value.name == COMPOSED:
            return [
                plain(ImplementationConfig.model_validate(item))
                for item in value.options["policies"]
            ]
        return {"name": value.name, **value.options} if value.options else value.name
    if isinstance(value, BaseModel):
        return {name: plain(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, SecretStr):
        return HIDDEN
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _flow(value: Any) -> str:
    text = yaml.safe_dump(
        value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6
    )
    return text.strip().removesuffix("...").strip()


def _rejected(resolved: Resolved, key: str) -> Iterator[str]:
    found = [(KINDS[kind].config_path, each) for kind, each in resolved.selections.items()]
    if resolved.prefill_attention is not None:
        found.append(("attention.prefill", resolved.prefill_attention))
    for path, selection in found:
        if path == key:
            for name, why in selection.rejected:
                yield f"not {name}: {' '.join(why.split())}"
