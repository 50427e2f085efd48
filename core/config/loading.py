"""From YAML, a mapping, `--set` and flags to an `EngineConfig`. Imports no torch.

Precedence: flags over `--set` over `mapping` over the file over defaults.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from octavo.core.config.flat import check_unmixed, from_flat, is_flat
from octavo.core.config.keywords import KEYWORDS
from octavo.core.config.models import EngineConfig, ImplementationConfig
from octavo.core.config.origin import Origin, Path, dotted
from octavo.core.config.validation import Problem, model_at, problems, show
from octavo.core.config.yaml_source import parse_value, read_yaml
from octavo.core.errors import ConfigError


def load_config(
    file: str | os.PathLike[str] | None = None,
    mapping: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    errors: list[ConfigError] | None = None,
) -> EngineConfig:
    """The configuration from all its sources.

    file: of YAML, in sections or with vLLM's flag names. mapping: nested, as the YAML would be.
    overrides: `"section.key=VALUE"` with the VALUE in YAML. flags: dotted key to value.
    Raises `ConfigError` with path, file and line. errors: a list that gets every value that is
    wrong instead; the configuration is then that of the others.
    """
    data: dict[str, Any] = {}
    origin = Origin()
    if file is not None:
        data, lines = _read(FilePath(file), str(file), errors)
        origin.update(lines, str(file))
    if mapping:
        _merge(data, copy.deepcopy(dict(mapping)), (), origin)
    for key, text in _ordered(overrides):
        _set(data, key, parse_value(text, "--set"), origin, "--set")
    for name, value in (flags or {}).items():
        _set(data, _split(name, name), value, origin, _argument(name))
    return _validate(data, origin, errors)


def _read(
    path: FilePath, file: str, errors: list[ConfigError] | None
) -> tuple[dict[str, Any], dict[Path, int]]:
    data, lines = read_yaml(path)
    check_unmixed(data, lines, file)
    if not is_flat(data):
        _anchor_plugin_files(data, path.parent)
        return data, lines
    found: list[ConfigError] = [] if errors is None else errors
    data, lines = from_flat(data, lines, file, found.append)
    if errors is None and found:
        raise found[0]
    return data, lines


def _argument(path: str) -> str:
    """How messages call what came as a flag or keyword: by vLLM's name where it has one."""
    names = [name for name, keyword in KEYWORDS.items() if keyword.path == path]
    return f"argument {names[0]}" if names else "argument"


def _validate(
    data: dict[str, Any], origin: Origin, errors: list[ConfigError] | None
) -> EngineConfig:
    odd = [key for key in data if not isinstance(key, str)]
    if odd:
        file, _ = origin.where(())
        raise ConfigError(
            f"a section must be named by text, got {show(odd[0])} (quote what YAML takes for "
            "something else)",
            file=file,
        )
    try:
        config = EngineConfig.model_validate(data)
    except ValidationError as exc:
        found = problems(exc, EngineConfig, data)
        found.sort(key=lambda problem: origin.where(problem.path)[1] or 0)
        if errors is None:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise _error(found[0], origin, more) from None
        errors += [_error(problem, origin) for problem in found]
        config = EngineConfig.model_validate(_without(data, [item.path for item in found]))
    config._origin = origin
    return config


def _error(problem: Problem, origin: Origin, more: str = "") -> ConfigError:
    file, line = origin.where(problem.path)
    return ConfigError(problem.message + more, path=dotted(problem.path), file=file, line=line)


def _without(data: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """`data` without the keys of sections (or the sections) in which these paths lie."""
    kept: dict[Any, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in data.items()}
    for path in paths:
        section, *below = path
        inside = kept.get(section)
        if below and isinstance(inside, dict):
            inside.pop(below[0], None)
        else:
            kept.pop(section, None)
    return kept


def _anchor_plugin_files(data: dict[str, Any], folder: FilePath) -> None:
    """Plugin files named in a YAML file are relative to its folder."""
    section = data.get("plugins")
    load = section.get("load") if isinstance(section, dict) else None
    if isinstance(load, list) and isinstance(section, dict):
        section["load"] = [
            os.path.join(os.path.abspath(folder), item)
            if isinstance(item, str) and item.startswith(("./", "../"))
            else item
            for item in load
        ]


def _merge(data: dict[str, Any], extra: Mapping[str, Any], path: Path, origin: Origin) -> None:
    """Put `extra` over `data`: sections key by key, everything else whole."""
    for key, value in extra.items():
        below = (*path, key)
        if isinstance(value, Mapping) and isinstance(data.get(key), dict) and _is_section(below):
            _merge(data[key], value, below, origin)
        else:
            data[key] = value
            if origin.where(below) != (None, None):
                origin.record(below, "mapping")


def _is_section(path: Path) -> bool:
    model = model_at(EngineConfig, path)
    return model is not None and model is not ImplementationConfig


def _split(key: str, whole: str) -> Path:
    parts = key.strip().replace("[", ".").replace("]", "").split(".")
    if not all(parts):
        raise ConfigError(f"expected section.key=VALUE, got {show(whole)}", file="--set")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _ordered(overrides: Sequence[str]) -> list[tuple[Path, str]]:
    """Paths and values, the names of choices first: an option belongs to the name it ends with."""
    split: list[tuple[Path, str]] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"expected section.key=VALUE, got {show(override)}", file="--set")
        split.append((_split(key, override), value))
    return sorted(split, key=lambda item: not _names_choice(item[0]))


def _names_choice(path: Path) -> bool:
    if path[-1] == "name":
        path = path[:-1]
    return _is_choice(path)


def _is_choice(path: Path) -> bool:
    """Whether a single choice lies at `path` (not a list of them)."""
    if not path or model_at(EngineConfig, path) is not ImplementationConfig:
        return False
    section = model_at(EngineConfig, path[:-1])
    field = section.model_fields.get(str(path[-1])) if section else None
    return isinstance(path[-1], int) or (
        field is not None
        and field.annotation in (ImplementationConfig, ImplementationConfig | None)
    )


def _set(data: dict[str, Any], path: Path, value: Any, origin: Origin, source: str) -> None:
    """Put one value at a path, making what is above it. A choice may be a bare name so far: it
    becomes a mapping when an option is set, and loses the old options when its name changes."""
    here: Any = data
    for depth, part in enumerate(path[:-1]):
        above = path[: depth + 1]
        below = _child(here, part, above, source)
        if _is_choice(above) and not isinstance(below, dict):
            below = _open_choice(below, above)
        if below is None:
            below = {}
        if not isinstance(below, dict | list):
            raise ConfigError(
                f"{dotted(above)} is {show(below)} and has no keys below it",
                path=dotted(path),
                file=source,
            )
        here[part] = below
        here = below
    last = path[-1]
    _child(here, last, path, source)
    if last == "name" and _is_choice(path[:-1]) and here.get("name") != value:
        here.clear()
    here[last] = value
    origin.record(path, source)


def _child(here: Any, part: str | int, path: Path, source: str) -> Any:
    """What lies at `part`; None when nothing does."""
    if isinstance(here, list):
        if not isinstance(part, int) or part >= len(here):
            raise ConfigError(
                f"expected an index below {len(here)}, got {part!r}",
                path=dotted(path),
                file=source,
            )
        return here[part]
    return here.get(part)


def _open_choice(value: Any, path: Path) -> dict[str, Any]:
    """A choice that is a bare name, or not given at all, as a mapping."""
    if value is None:
        section = model_at(EngineConfig, path[:-1])
        field = section.model_fields.get(str(path[-1])) if section else None
        default = field.default if field else None
        value = default.name if isinstance(default, ImplementationConfig) else "auto"
    return {"name": value}
