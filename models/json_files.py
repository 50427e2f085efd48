"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.core.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON file that must hold a mapping."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file}: expected a mapping, got {type(value).__name__}")
    return value
