"""What differs between sides: resolved configuration, plugins with their versions, budgets."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.engine.config import EngineConfig
from octavo.engine.report import StartupReport

IRRELEVANT = ("server", "observability")
"""Sections that say nothing of an engine in a process of its own."""
REPORTED = (
    "num_parameters",
    "weight_bytes",
    "kv_bytes",
    "num_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_swap_blocks",
)


def flat_config(config: EngineConfig) -> dict[str, Any]:
    """Dotted keys of a resolved configuration; a choice stays whole."""
    from octavo.core.config.models import plain

    found: dict[str, Any] = {}
    for section in type(config).model_fields:
        if section in IRRELEVANT:
            continue
        value = plain(getattr(config, section))
        if isinstance(value, dict):
            found |= {f"{section}.{key}": item for key, item in value.items()}
        else:
            found[section] = value
    return found


def plugin_versions(report: StartupReport) -> dict[str, str]:
    """Kind to `name (distribution version)`."""
    found: dict[str, list[str]] = {}
    for choice in report.plugins:
        version = ""
        if choice.distribution:
            try:
                version = f" ({choice.distribution} {_version(choice.distribution)})"
            except importlib.metadata.PackageNotFoundError:
                version = f" ({choice.distribution})"
        found.setdefault(choice.kind, []).append(choice.name + version)
    return {kind: ", ".join(names) for kind, names in found.items()}


def _version(distribution: str) -> str:
    return importlib.metadata.version(distribution)


def differences(facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(key, value of each side) where they are not all equal: what was configured first, then
    plugins, then what followed from it at the start."""
    rows: list[tuple[str, list[Any]]] = []
    for part, prefix in (("config", ""), ("plugins", "plugin: ")):
        keys = dict.fromkeys(key for fact in facts for key in fact.get(part) or {})
        for key in keys:
            values = [(fact.get(part) or {}).get(key) for fact in facts]
            if any(value != values[0] for value in values):
                rows.append((prefix + key, values))
    reports = [fact.get("report") or {} for fact in facts]
    for key in REPORTED:
        values = [report.get(key) for report in reports]
        if any(value != values[0] for value in values):
            rows.append((f"at start: {key}", values))
    for key in ("kind", "url", "model"):
        values = [fact.get(key) for fact in facts]
        if any(value != values[0] for value in values):
            rows.append((key, values))
    return rows
