"""A resolved configuration as YAML, with comments that say what `auto` chose and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from octavo.core.config.models import plain
from octavo.core.contracts import KINDS
from octavo.engine.config import EngineConfig
from octavo.engine.resolve import Resolved


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
    for section in type(config).model_fields:
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
