"""What `octavo plugins` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from octavo.core.availability import availability
from octavo.core.contracts import KINDS, Platform, ProbeContext
from octavo.core.registry import Registry


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


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
