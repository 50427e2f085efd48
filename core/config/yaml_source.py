"""Parses YAML into plain data with the line of every key. Duplicate keys and unknown tags are
errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any

import yaml

from octavo.core.config.origin import Path, dotted
from octavo.core.errors import ConfigError

MAX_DEPTH = 100
"""Deepest nesting of mappings and lists, well below Python's recursion limit."""


class _Loader(yaml.SafeLoader):
    """A safe loader that reads `1e-3` as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)$"),
    list("-+.0123456789"),
)


@dataclass(frozen=True)
class YamlFile:
    """A configuration file that was read."""

    path: str
    data: dict[str, Any]
    lines: dict[Path, int]
    """1-based line of each key and list item."""


def read_yaml(path: FilePath) -> YamlFile:
    """Read a file. Raises `ConfigError` naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file", file=str(path)) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot be read: {exc}", file=str(path)) from None
    data, lines = _parse(text, str(path))
    if data is None:
        return YamlFile(str(path), {}, {})
    if not isinstance(data, dict):
        raise ConfigError(
            f"expected a mapping of sections, got {type(data).__name__}", file=str(path), line=1
        )
    return YamlFile(str(path), data, lines)


def parse_value(text: str, file: str) -> Any:
    """Parse one value, as in `--set key=VALUE`. The empty string is null."""
    return _parse(text, file)[0]


def _parse(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            builder = _Builder(loader, file)
            return (None if node is None else builder.build(node, ())), builder.lines
        finally:
            loader.dispose()
    except RecursionError:
        raise ConfigError(f"nested more than {MAX_DEPTH} levels deep", file=file) from None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        line = mark.line + 1 if mark else None
        message = exc.problem or exc.context or "malformed"
        raise ConfigError(f"not valid YAML: {message}", file=file, line=line) from None
    except yaml.YAMLError as exc:
        raise ConfigError(f"not valid YAML: {' '.join(str(exc).split())}", file=file) from None


class _Builder:
    """Builds data from a node graph and records lines."""

    def __init__(self, loader: _Loader, file: str) -> None:
        self._loader, self._file = loader, file
        self._open: set[int] = set()
        self.lines: dict[Path, int] = {}

    def build(self, node: yaml.Node, path: Path) -> Any:
        self.lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.ScalarNode):
            return self._loader.construct_object(node)
        if id(node) in self._open:
            raise self._error(node, path, "recursive alias")
        if len(self._open) >= MAX_DEPTH:
            raise self._error(node, path[:3], f"nested more than {MAX_DEPTH} levels deep")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if node.tag != "tag:yaml.org,2002:seq":
                raise self._error(node, path, f"unexpected tag {node.tag}")
            return [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[Any, Any]:
        if node.tag != "tag:yaml.org,2002:map":
            raise self._error(node, path, f"unexpected tag {node.tag}")
        first_lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._error(key_node, path, "mapping keys must be scalars")
            key = self._loader.construct_object(key_node)
            if key in first_lines:
                message = f"duplicate key, first set on line {first_lines[key]}"
                raise self._error(key_node, (*path, key), message)
            first_lines[key] = key_node.start_mark.line + 1
        self._loader.flatten_mapping(node)  # puts the keys of `<<: *alias` before the others
        result: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node)
            self.lines[*path, key] = key_node.start_mark.line + 1
            result[key] = self.build(value_node, (*path, key))
        return result

    def _error(self, node: yaml.Node, path: Path, message: str) -> ConfigError:
        return ConfigError(
            message, path=dotted(path) or None, file=self._file, line=node.start_mark.line + 1
        )
