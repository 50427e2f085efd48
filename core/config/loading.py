"""From YAML, mappings, `--set` and flags to a validated configuration."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path as FilePath
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from octavo.core import envvars
from octavo.core.config.models import BaseConfig, ImplementationConfig
from octavo.core.config.origin import Origin, Path, dotted
from octavo.core.config.validation import Problem, model_at, problems, show
from octavo.core.config.yaml_source import YamlFile, parse_value, read_yaml
from octavo.core.errors import ConfigError

GROUP = "octavo.config"

C = TypeVar("C", bound=BaseConfig)

log = logging.getLogger(GROUP)


def config_model(base: type[C]) -> type[C]:
    """`base` with the sections of installed packages, see `octavo.core.config`.

    A third party's that cannot be imported is left out with a warning; so is one that the
    environment variable OCTAVO_PLUGINS does not name.
    """
    allowed = envvars.PLUGINS.get()
    models: list[type[C]] = [base]
    for point in entry_points(group=GROUP):
        distribution = point.dist.name if point.dist else ""
        named = allowed is None or {point.name, distribution} & set(allowed)
        if distribution != "octavo" and not named:
            continue
        try:
            model = point.load()
            if not issubclass(model, BaseConfig):
                raise TypeError("expected a subclass of EngineConfig")
        except Exception as exc:
            log.warning("%s of '%s' cannot be loaded: %s", point.value, distribution, exc)
            continue
        models.append(model)
    widest = [one for one in models if not any(issubclass(m, one) and m != one for m in models)]
    widest = list(dict.fromkeys(widest))
    return widest[0] if len(widest) == 1 else type("Config", tuple(widest), {})


def load_config(
    base: type[C],
    file: str | os.PathLike[str] | YamlFile | None = None,
    *,
    mapping: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    errors: list[ConfigError] | None = None,
    flag_names: Mapping[str, str] | None = None,
) -> C:
    """A configuration from all its sources, the weakest first; defaults are weaker still.

    base: the model, to which `config_model` adds sections. file: path of a YAML file, or its
    contents. mapping: nested, as the YAML would be. overrides: `"section.key=VALUE"` with the VALUE
    in YAML. flags: dotted key to value. flag_names: dotted key to the name that error messages give
    its flag.

    Raises `ConfigError` with path, file and line. With a list `errors`, invalid values are added to
    it and left out of the configuration instead.
    """
    draft = _Draft(config_model(base))
    if file is not None:
        draft.add_file(file if isinstance(file, YamlFile) else read_yaml(FilePath(file)))
    if mapping:
        draft.merge(draft.data, copy.deepcopy(dict(mapping)))
    draft.add_overrides(overrides)
    for key, value in (flags or {}).items():
        name = (flag_names or {}).get(key)
        draft.set(_split(key, key), value, f"argument {name}" if name else "argument")
    return draft.validate(errors)


class _Draft(Generic[C]):
    """Nested data that is not validated yet, and where each value came from."""

    def __init__(self, model: type[C]) -> None:
        self.model = model
        self.data: dict[str, Any] = {}
        self.origin = Origin()

    def add_file(self, file: YamlFile) -> None:
        self.data |= file.data
        _anchor_plugin_files(self.data, FilePath(file.path).parent)
        self.origin.update(file.lines, file.path)

    def add_overrides(self, overrides: Sequence[str]) -> None:
        """`--set`. Names of implementations are set first: the options belong to them."""
        split: list[tuple[Path, str]] = []
        for override in overrides:
            key, equals, value = override.partition("=")
            if not equals:
                raise ConfigError(f"expected section.key=VALUE, got {show(override)}", file="--set")
            split.append((_split(key, override), value))
        split.sort(key=lambda item: not self._names_implementation(item[0]))
        for path, text in split:
            self.set(path, parse_value(text, "--set"), "--set")

    def merge(self, data: dict[str, Any], extra: Mapping[str, Any], path: Path = ()) -> None:
        """Put `extra` over `data`, which lies at `path`: sections key by key, the rest whole."""
        for key, value in extra.items():
            below = (*path, key)
            model = model_at(self.model, below)
            if (
                model not in (None, ImplementationConfig)
                and isinstance(value, Mapping)
                and isinstance(data.get(key), dict)
            ):
                self.merge(data[key], value, below)
            else:
                data[key] = value
                if self.origin.where(below) != (None, None):
                    self.origin.record(below, "mapping")

    def set(self, path: Path, value: Any, source: str) -> None:
        """Put one value at a path, making what is above it. An implementation may be a bare name so
        far: it becomes a mapping with its first option, and loses its options with its name."""
        here: Any = self.data
        for depth, part in enumerate(path[:-1]):
            above = path[: depth + 1]
            below = _child(here, part, above, source)
            if self._is_implementation(above) and not isinstance(below, dict):
                below = {"name": self._default_name(above) if below is None else below}
            if below is None:
                below = {}
            if not isinstance(below, dict | list):
                raise ConfigError(
                    f"{dotted(above)} is {show(below)}, not a mapping",
                    path=dotted(path),
                    file=source,
                )
            here[part] = below
            here = below
        last = path[-1]
        _child(here, last, path, source)
        if last == "name" and self._is_implementation(path[:-1]) and here.get("name") != value:
            here.clear()
        here[last] = value
        self.origin.record(path, source)

    def validate(self, errors: list[ConfigError] | None) -> C:
        odd = [key for key in self.data if not isinstance(key, str)]
        if odd:
            raise ConfigError(
                f"section names must be strings, got {show(odd[0])} (quote it)",
                file=self.origin.where(())[0],
            )
        try:
            config = self.model.model_validate(self.data)
        except ValidationError as exc:
            found = problems(exc, self.model, self.data)
            found.sort(key=lambda problem: self.origin.where(problem.path)[1] or 0)
            if errors is None:
                more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
                raise self._error(found[0], more) from None
            errors += [self._error(problem) for problem in found]
            config = self.model.model_validate(_without(self.data, [item.path for item in found]))
        config._origin = self.origin
        return config

    def _error(self, problem: Problem, more: str = "") -> ConfigError:
        file, line = self.origin.where(problem.path)
        return ConfigError(problem.message + more, path=dotted(problem.path), file=file, line=line)

    def _names_implementation(self, path: Path) -> bool:
        return self._is_implementation(path[:-1] if path[-1] == "name" else path)

    def _is_implementation(self, path: Path) -> bool:
        """Whether a single implementation is chosen at `path` (not a list of them)."""
        if not path or model_at(self.model, path) is not ImplementationConfig:
            return False
        field = self._field(path)
        return isinstance(path[-1], int) or (
            field is not None
            and field.annotation in (ImplementationConfig, ImplementationConfig | None)
        )

    def _default_name(self, path: Path) -> str:
        field = self._field(path)
        default = field.default if field else None
        return default.name if isinstance(default, ImplementationConfig) else "auto"

    def _field(self, path: Path) -> Any:
        section = model_at(self.model, path[:-1])
        return section.model_fields.get(str(path[-1])) if section else None


def _split(key: str, whole: str) -> Path:
    parts = key.strip().replace("[", ".").replace("]", "").split(".")
    if not all(parts):
        raise ConfigError(f"expected section.key=VALUE, got {show(whole)}", file="--set")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def _child(here: Any, part: str | int, path: Path, source: str) -> Any:
    """What lies at `part`, or None."""
    if not isinstance(here, list):
        return here.get(part)
    if not isinstance(part, int) or part >= len(here):
        raise ConfigError(
            f"expected a list index below {len(here)}, got {part!r}",
            path=dotted(path),
            file=source,
        )
    return here[part]


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
    """Make plugin files named in a YAML file relative to its folder."""
    section = data.get("plugins")
    load = section.get("load") if isinstance(section, dict) else None
    if isinstance(load, list) and isinstance(section, dict):
        section["load"] = [
            os.path.join(os.path.abspath(folder), item)
            if isinstance(item, str) and item.startswith(("./", "../"))
            else item
            for item in load
        ]
