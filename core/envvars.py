"""The environment variables that Octavo reads: one registry, documented, that raises on bad values.

Nothing else in Octavo reads `os.environ` for a variable of its own. Values are read when asked for,
so that a test or a caller may set them after the import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from octavo.core.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """name: of the variable. kind, default: as shown in the reference. doc: one sentence.
    parse: from the text (None: not set) to the value; raises `ValueError` saying what it wants."""

    name: str
    kind: str
    default: str
    doc: str
    parse: Callable[[str | None], T]

    def get(self) -> T:
        """The value now. Raises `ConfigError` naming the variable, the value and what is wanted."""
        text = os.environ.get(self.name)
        try:
            return self.parse(text)
        except ValueError as exc:
            raise ConfigError(
                f"environment variable {self.name}: expected {exc}, got {text!r}"
            ) from None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _folder(text: str | None) -> Path:
    if text is None:
        return Path("~/.cache/octavo").expanduser()
    path = Path(text).expanduser()
    if not text.strip():
        raise ValueError("a folder")
    if path.exists() and not path.is_dir():
        raise ValueError("a folder, not a file")
    return path


_LEVELS = ("debug", "info", "warning", "error")


def _log_level(text: str | None) -> str:
    if text is None:
        return "info"
    if text.lower() not in _LEVELS:
        raise ValueError(f"one of {', '.join(_LEVELS)}")
    return text.lower()


def _switch(text: str | None) -> bool:
    if text not in (None, "", "0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


PLUGINS = EnvVar(
    "OCTAVO_PLUGINS",
    "names, comma-separated",
    "not set: all that are installed",
    "Allowlist of third-party distributions or entry points of the group `octavo`; when set, no "
    "other one is loaded. Octavo's own, and what `plugins.load` names, are always loaded.",
    _names,
)
CACHE_DIR = EnvVar(
    "OCTAVO_CACHE_DIR",
    "folder",
    "~/.cache/octavo",
    "Where converted weights and compiled kernels are kept.",
    _folder,
)
LOG_LEVEL = EnvVar(
    "OCTAVO_LOG_LEVEL",
    "debug, info, warning or error",
    "info",
    "Least severe log messages that the command line prints.",
    _log_level,
)

CPU_ISAS = ("native", "avx2", "generic")


def _isa(text: str | None) -> str:
    if text is not None and text not in CPU_ISAS:
        raise ValueError(f"one of {', '.join(CPU_ISAS)}")
    return text or "native"


CPU_ISA = EnvVar(
    "OCTAVO_CPU_ISA",
    "native, avx2 or generic",
    "native: all that this CPU has",
    "Instruction set that the native CPU kernels are compiled for.",
    _isa,
)

API_KEYS = EnvVar(
    "OCTAVO_API_KEYS",
    "keys, comma-separated",
    "not set",
    "API keys of the server beside those of the configuration, each a key or `name:key`.",
    _names,
)

TRACE_HOOKS = EnvVar(
    "OCTAVO_TRACE_HOOKS",
    "0 or 1",
    "0",
    "Whether each call of a plugin's hook is printed on stderr, with what it offers.",
    _switch,
)

_SECRET = (API_KEYS.name,)


def child_environment(*, secrets: bool = False) -> dict[str, str]:
    """For a Python process that imports from the same places as this one. secrets: whether it has
    a use for them."""
    kept = {name: value for name, value in os.environ.items() if secrets or name not in _SECRET}
    places = [place or os.getcwd() for place in sys.path]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}


ALL: tuple[EnvVar[Any], ...] = (PLUGINS, CACHE_DIR, LOG_LEVEL, CPU_ISA, API_KEYS, TRACE_HOOKS)


def check() -> None:
    """Raise `ConfigError` for the first variable whose value cannot be read."""
    for variable in ALL:
        variable.get()
