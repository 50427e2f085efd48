"""vLLM's own form of a configuration file: flag names with their values, and no sections."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from octavo.core.config.keywords import KEYWORDS, Keyword, from_keywords, integer
from octavo.core.config.models import EngineConfig
from octavo.core.config.origin import Path
from octavo.core.config.validation import show
from octavo.core.errors import ConfigError, nearest

Refuse = Callable[[ConfigError], None]


def is_flat(data: Mapping[Any, Any]) -> bool:
    """Whether these keys are flags rather than sections."""
    return any(map(_looks_flat, data.items())) and not any(map(_is_section, data.items()))


def check_unmixed(data: Mapping[Any, Any], lines: Mapping[Path, int], file: str) -> None:
    """Raise `ConfigError` when flags stand beside sections."""
    flags = [
        key for key, value in data.items() if keyword_of(key) and not _is_section((key, value))
    ]
    sections = [key for key, value in data.items() if _is_section((key, value))]
    if flags and sections:
        keyword = KEYWORDS[keyword_of(flags[0]) or ""]
        message = f"a flag beside the section '{sections[0]}', expected only flags or only sections"
        raise ConfigError(
            message + (f"; did you mean '{keyword.path}'?" if keyword.path else ""),
            path=str(flags[0]),
            file=file,
            line=lines.get((flags[0],)),
        )


def from_flat(
    data: Mapping[Any, Any], lines: Mapping[Path, int], file: str, refuse: Refuse
) -> tuple[dict[str, Any], dict[Path, int]]:
    """Sections, and the lines of their keys. What is wrong is handed to `refuse`."""
    sections: dict[str, Any] = {}
    places: dict[Path, int] = {}
    for key, value in data.items():
        line = lines.get((key,), 0)
        try:
            flags = _translate(str(key), value)
        except ConfigError as error:
            refuse(ConfigError(error.message, file=file, line=line or None))
            continue
        for path, setting in flags.items():
            section, _, name = path.partition(".")
            sections.setdefault(section, {})[name] = setting
            places[section, name] = line
    return sections, places


def keyword_of(key: Any) -> str | None:
    """The keyword that a flag's name stands for; `no-x` is the negation of a true-or-false one."""
    name = str(key).replace("-", "_")
    if name in KEYWORDS:
        return name
    positive = name.removeprefix("no_")
    if positive != name and positive in KEYWORDS and KEYWORDS[positive].form == "bool":
        return positive
    flag = "--" + str(key).replace("_", "-")
    return next((known for known, found in KEYWORDS.items() if flag in found.aliases), None)


def _translate(key: str, value: Any) -> dict[str, Any]:
    name = keyword_of(key)
    if name is None:
        flags = [known.replace("_", "-") for known in KEYWORDS]
        hint = nearest(key.replace("_", "-"), flags)
        raise ConfigError(f"unknown flag '{key}'" + (f"; {hint}" if hint.startswith("did") else ""))
    keyword = KEYWORDS[name]
    value = _typed(key, keyword, value)
    if keyword.form == "bool" and value is not None and key.replace("-", "_") == f"no_{name}":
        value = not value
    return from_keywords({name: value})


def _typed(key: str, keyword: Keyword, value: Any) -> Any:
    """A value as the command line would give it."""
    if keyword.form == "bool" and not isinstance(value, bool | None):
        raise ConfigError(f"{key}: expected true or false, got {show(value)}")
    if keyword.form == "int" and isinstance(value, str):
        return integer(value)
    if keyword.form == "float" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    if keyword.form == "list" and isinstance(value, str | int):
        return [str(value)]
    if keyword.form == "mapping" and isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{key}: expected a mapping, got {show(value)}") from None
    return value


def _is_section(item: tuple[Any, Any]) -> bool:
    """Whether a key is one of ours; `model` is a flag too, with a text."""
    key, value = item
    return key in EngineConfig.model_fields and not (key in KEYWORDS and isinstance(value, str))


def _looks_flat(item: tuple[Any, Any]) -> bool:
    key, value = item
    return keyword_of(key) is not None or not isinstance(value, dict)
