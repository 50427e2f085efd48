"""What commands write with `--json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def write_json(file: Path, result: Any) -> None:
    """As JSON (RFC 8259), which has no NaN and no infinity: such values become null."""
    text = json.dumps(_finite(result), indent=1, allow_nan=False)
    file.write_text(text + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(held) for held in value]
    return value
