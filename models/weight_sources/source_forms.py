"""Which weight source a `model.source` is meant for, by its form. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.core.contracts import Availability, ProbeContext

PACKAGE_PREFIX = "package:"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def form(source: str) -> str:
    """`package`, `gguf`, `folder` or `hub`.

    Something that exists in the file system is that. What exists nowhere is a hub id when it has
    the syntax of one, and else taken for a path, so that the error names the path.
    """
    if source.startswith(PACKAGE_PREFIX):
        return "package"
    path = Path(source).expanduser()
    if path.is_dir():
        return "folder"
    if path.suffix.lower() == ".gguf":
        return "gguf"
    if path.exists() or not _HUB_ID.fullmatch(source):
        return "folder"
    return "hub"


def _probe(name: str, context: ProbeContext, wanted: str) -> Availability:
    source = context.facts.get("source")
    if source is None or form(source) == name:
        return Availability(True)
    return Availability(False, f"'{source}' is not {wanted}")


def probe_folder(context: ProbeContext) -> Availability:
    return _probe("folder", context, "a folder")


def probe_gguf(context: ProbeContext) -> Availability:
    return _probe("gguf", context, "a .gguf file")


def probe_package(context: ProbeContext) -> Availability:
    return _probe("package", context, "package:NAME[/FILE]")


def probe_hub(context: ProbeContext) -> Availability:
    return _probe("hub", context, "a hub id")
