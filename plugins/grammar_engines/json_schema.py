"""JSON schemas: what xgrammar would pass over in silence is refused."""

from __future__ import annotations

import json
from typing import Any


def prepared_schema(text: str) -> Any:
    """The schema that xgrammar gets. Raises `RequestError` for what it does not support."""
    return json.loads(text)
