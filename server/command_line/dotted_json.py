"""vLLM's second way to write a mapping on the command line: `--hf-overrides.rope.factor 4`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.core.errors import ConfigError
from octavo.frontend.vllm.keywords import KEYWORDS

_FLAGS = frozenset(
    f"--{name.replace('_', '-')}" for name, known in KEYWORDS.items() if known.form == "mapping"
)


def join_mappings(argv: Sequence[str]) -> list[str]:
    """The arguments with dotted ones put together as one JSON value a flag. A key that ends with
    `+` adds to a list. Raises `ConfigError` for one without a value, or inside another value."""
    rest: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    items = iter(argv)
    for item in items:
        name, equals, value = item.partition("=")
        flag, dot, path = name.partition(".")
        flag = flag.replace("_", "-")
        if not dot or flag not in _FLAGS:
            rest.append(item)
            continue
        if not equals:
            given = next(items, None)
            if given is None:
                raise ConfigError(f"{name}: expected a value")
            value = given
        _put(found.setdefault(flag, {}), path.split("."), _value(value), name)
    for flag, mapping in found.items():
        if flag in (item.partition("=")[0].replace("_", "-") for item in rest):
            raise ConfigError(f"{flag}: use either one JSON value or dotted keys, not both")
        rest += [flag, json.dumps(mapping)]
    return rest


def _put(mapping: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    *above, last = path
    here: Any = mapping
    for part in above:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{name}: '{part}' already has a value")
    if last.endswith("+"):
        here = here.setdefault(last[:-1], [])
        if not isinstance(here, list):
            raise ConfigError(f"{name}: '{last[:-1]}' is not a list")
        here.append(value)
    else:
        here[last] = value


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
