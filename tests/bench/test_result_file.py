"""Files of results are JSON, whatever was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

from octavo.bench.result_file import write_json


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": [1, math.nan, (2.5, -math.inf)], "b": {"c": math.inf, "d": "ä"}})
    assert "NaN" not in file.read_text()
    found = json.loads(file.read_text(), parse_constant=str)
    assert found == {"a": [1, None, [2.5, None]], "b": {"c": None, "d": "ä"}}
