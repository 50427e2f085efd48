"""Environment variables: one registry, documented, that raises on invalid values.

Each variable is declared as an `EnvVar` beside the code that reads it, and is read when asked for,
so that a test or a caller may set it after the import. Octavo reads no other variable of its own.
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

DECLARED: dict[str, EnvVar[Any]] = {}
"""Every variable declared by the modules that are imported so far, by name."""


@dataclass(frozen=True)
class EnvVar(Generic[T]):
    """One environment variable. Creating it declares it."""

    name: str
    kind: str
    """Type, as shown in the reference."""
    default: str
    """As shown in the reference."""
    doc: str
    parse: Callable[[str | None], T]
    """From the text (None: not set) to the value. Raises `ValueError` saying what it expects."""
    secret: bool = False
    """Kept from child processes that have no use for it."""

    def __post_init__(self) -> None:
        DECLARED[self.name] = self

    def get(self) -> T:
        """The current value. Raises `ConfigError` for an invalid one."""
        text = os.environ.get(self.name)
        try:
            return self.parse(text)
        except ValueError as exc:
            raise ConfigError(
                f"environment variable {self.name}: expected {exc}, got {text!r}"
            ) from None


def check() -> None:
    """Raise `ConfigError` for the first declared variable with an invalid value."""
    for variable in DECLARED.values():
        variable.get()


def child_environment(*, secrets: bool = False) -> dict[str, str]:
    """Environment of a Python process that imports from the same places as this one."""
    # API keys by name too: whoever declares them need not have been imported.
    hidden = {"OCTAVO_API_KEYS"} | {name for name, each in DECLARED.items() if each.secret}
    hidden = set() if secrets else hidden
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    places = [place or os.getcwd() for place in sys.path]
    return {**kept, "PYTHONPATH": os.pathsep.join(dict.fromkeys(places))}


def one_of(*names: str, default: str) -> Callable[[str | None], str]:
    """Parser for a name, in upper or lower case."""

    def parse(text: str | None) -> str:
        if text is None:
            return default
        if text.lower() not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return text.lower()

    return parse


def name_list(text: str | None) -> tuple[str, ...] | None:
    """Parser for comma-separated names."""
    if text is None:
        return None
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _directory(text: str | None) -> Path:
    path = Path("~/.cache/octavo" if text is None else text).expanduser()
    if not str(text).strip():
        raise ValueError("a directory")
    if path.exists() and not path.is_dir():
        raise ValueError("a directory, not a file")
    return path


def _switch(text: str | None) -> bool:
    if text not in (None, "", "0", "1"):
        raise ValueError("0 or 1")
    return text == "1"


PLUGINS = EnvVar(
    "OCTAVO_PLUGINS",
    "names, comma-separated",
    "not set: all that are installed",
    "Allowlist of third-party distributions or entry points of the group `octavo`; when set, no "
    "others are loaded. Octavo's own plugins and those in `plugins.load` are always loaded.",
    name_list,
)
CACHE_DIR = EnvVar(
    "OCTAVO_CACHE_DIR",
    "directory",
    "~/.cache/octavo",
    "Directory for converted weights and compiled kernels.",
    _directory,
)
TRACE_HOOKS = EnvVar(
    "OCTAVO_TRACE_HOOKS",
    "0 or 1",
    "0",
    "Print each call of a plugin hook, with its result, on stderr.",
    _switch,
)
