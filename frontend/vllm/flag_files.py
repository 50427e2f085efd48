"""vLLM's form of a configuration file: flag names with their values, and no sections."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Container, Mapping
from typing import Any

from octavo.core.config.origin import Path
from octavo.core.config.validation import show
from octavo.core.config.yaml_source import YamlFile
from octavo.core.errors import ConfigError, nearest
from octavo.frontend.vllm.keywords import KEYWORDS, Keyword, from_keywords, integer


def with_sections(
    file: YamlFile, sections: Container[str], errors: list[ConfigError] | None
) -> YamlFile:
    """The file, with its flags (if it holds flags) put into sections.

    Raises `ConfigError` when flags and sections are mixed, and for an invalid flag; those are added
    to `errors` instead when it is given.
    """
    names = [key for key, value in file.data.items() if _is_section(key, value, sections)]
    flags = [key for key in file.data if keyword_of(key) and key not in names]
    if names and flags:
        keyword = KEYWORDS[keyword_of(flags[0]) or ""]
        raise ConfigError(
            f"flag next to section '{names[0]}': use only flags or only sections"
            + (f"; did you mean '{keyword.path}'?" if keyword.path else ""),
            path=str(flags[0]),
            file=file.path,
            line=file.lines.get((flags[0],)),
        )
    other = any(not isinstance(value, dict) for value in file.data.values())
    if names or not (flags or other):
        return file
    found: list[ConfigError] = []
    data, lines = _to_sections(file, found)
    if errors is None and found:
        raise found[0]
    if errors is not None:
        errors += found
    return YamlFile(file.path, data, lines)


def keyword_of(key: Any) -> str | None:
    """The keyword that a flag's name stands for; `no-x` negates a boolean one."""
    name = str(key).replace("-", "_")
    if name in KEYWORDS:
        return name
    positive = name.removeprefix("no_")
    if positive != name and positive in KEYWORDS and KEYWORDS[positive].form == "bool":
        return positive
    flag = "--" + str(key).replace("_", "-")
    return next((known for known, found in KEYWORDS.items() if flag in found.aliases), None)


def _is_section(key: Any, value: Any, sections: Container[str]) -> bool:
    """Whether it is a section; `model` is a flag too, with a string."""
    return key in sections and not (key in KEYWORDS and isinstance(value, str))


def _to_sections(
    file: YamlFile, errors: list[ConfigError]
) -> tuple[dict[str, Any], dict[Path, int]]:
    data: dict[str, Any] = {}
    lines: dict[Path, int] = {}
    for key, value in file.data.items():
        line = file.lines.get((key,), 0)
        try:
            settings = _translate(str(key), value)
        except ConfigError as error:
            errors.append(ConfigError(error.message, file=file.path, line=line or None))
            continue
        for path, setting in settings.items():
            section, _, name = path.partition(".")
            data.setdefault(section, {})[name] = setting
            lines[section, name] = line
    return data, lines


def _translate(key: str, value: Any) -> Mapping[str, Any]:
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
