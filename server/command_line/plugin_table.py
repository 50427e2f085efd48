"""What `octavo plugins` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic.fields import FieldInfo

from octavo.core.availability import availability
from octavo.core.config.models import plain
from octavo.core.contracts import KINDS, Platform, ProbeContext, Requirement
from octavo.core.plugin_loading import Registered
from octavo.core.plugin_options import options_model
from octavo.core.registry import Registry
from octavo.server.command_line.config_reference import type_text


def plugin_report(registry: Registry, platform: Platform) -> dict[str, Any]:
    """Every registered implementation, plugins that failed, and names offered twice."""
    found = []
    for kind in KINDS:
        for entry in sorted(registry.entries(kind), key=lambda e: (e.name, e.distribution or "")):
            answer = availability(entry, ProbeContext(platform))
            found.append(
                {
                    "kind": kind,
                    "name": entry.name,
                    "package": entry.distribution,
                    "version": entry.version,
                    "where": entry.where,
                    "available": answer.available,
                    "reason": " ".join(answer.reason.split()),
                    "rank": entry.provider.rank,
                    "summary": entry.provider.summary,
                }
            )
    return {
        "platform": {"device": platform.device, "capability": platform.capability},
        "plugins": found,
        "failures": [
            {"where": str(failure.source), "message": failure.message}
            for failure in registry.failures
        ],
        "conflicts": [
            {
                "kind": group[0].kind,
                "name": group[0].name,
                "offered_by": [str(entry.source) for entry in group],
            }
            for group in registry.conflicts()
        ],
    }


def table(report: dict[str, Any]) -> Iterator[str]:
    """The report as lines of text."""
    rows = [["KIND", "NAME", "PACKAGE", "VERSION", "AVAILABLE"]]
    for item in report["plugins"]:
        state = "yes" if item["available"] else f"no: {item['reason']}"
        package = item["package"] or item["where"]
        rows.append([item["kind"], item["name"], package, item["version"] or "-", state])
    yield from _columns(rows)
    for failure in report["failures"]:
        yield f"not loaded: {failure['where']} {failure['message']}"
    for conflict in report["conflicts"]:
        offered = " and ".join(conflict["offered_by"])
        yield f"conflict: {conflict['kind']} '{conflict['name']}' is offered by {offered}"


def details(entry: Registered, platform: Platform) -> dict[str, Any]:
    """All that is known of one implementation, its options included."""
    provider, kind = entry.provider, KINDS[entry.kind]
    answer = availability(entry, ProbeContext(platform))
    factory = provider.factory
    if not isinstance(factory, str):
        factory = f"{factory.__module__}:{factory.__qualname__}"
    return {
        "kind": entry.kind,
        "name": entry.name,
        "summary": provider.summary,
        "package": entry.distribution,
        "version": entry.version,
        "where": entry.where,
        "factory": factory,
        "contract_version": provider.contract_version,
        "our_contract_version": kind.version,
        "config_path": kind.config_path,
        "rank": provider.rank,
        "available": answer.available,
        "reason": " ".join(answer.reason.split()),
        "requirements": [_requirement(item) for item in provider.requires],
        "options": [
            {
                "name": name,
                "type": type_text(field),
                "default": None if field.is_required() else plain(_default(field)),
                "required": field.is_required(),
                "description": field.description or "",
            }
            for name, field in options_model(entry).model_fields.items()
        ],
    }


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _requirement(item: Requirement) -> str:
    parts = []
    if item.package:
        extra = f" (pip install 'octavo[{item.extra}]')" if item.extra else ""
        parts.append(f"package {item.package}{extra}")
    if item.devices:
        parts.append(f"device {' or '.join(item.devices)}")
    if item.capability:
        parts.append(f"compute capability {'.'.join(map(str, item.capability))}")
    return ", ".join(parts)


def details_text(found: dict[str, Any]) -> Iterator[str]:
    """The same as lines of text."""
    yield f"{found['kind']} {found['name']}: {found['summary']}"
    state = "yes" if found["available"] else "no"
    package = f"{found['package']} {found['version']}, " if found["package"] else ""
    chosen = "by `auto`" if found["rank"] >= 0 else "only when named"
    yield from _columns(
        [
            ["  from", f"{package}{found['where']}"],
            ["  factory", found["factory"]],
            [
                "  contract",
                f"written for version {found['contract_version']}, "
                f"this Octavo has {found['our_contract_version']}",
            ],
            ["  available", f"{state}: {found['reason']}" if found["reason"] else state],
            ["  chosen", f"{chosen} (rank {found['rank']}), key {found['config_path']}"],
            ["  requires", "; ".join(found["requirements"]) or "nothing"],
        ]
    )
    if not found["options"]:
        yield "  options    none"
        return
    yield "  options"
    rows = [
        [
            f"    {option['name']}",
            option["type"],
            "required" if option["required"] else f"default {json.dumps(option['default'])}",
            option["description"],
        ]
        for option in found["options"]
    ]
    yield from _columns(rows)


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
