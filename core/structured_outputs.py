"""`StructuredOutputsParams`: constraints on an output, under vLLM's names.

A specification that is invalid by itself (two kinds at once, an empty choice, invalid JSON, deep
nesting) is rejected here; whether it can be compiled is up to the grammar engine.
"""

from __future__ import annotations

import json as json_text
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from octavo.core.errors import RequestError, nearest

MAX_BYTES = 1 << 20
"""Maximum size of a specification in UTF-8."""

MAX_DEPTH = 64
"""Maximum nesting of a schema: compiling is at least quadratic in it."""

PARAM = "structured_outputs"
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(
    msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True, forbid_unknown_fields=True
):
    """Exactly one of the first six, and how JSON is written. Hashable; equal ones share one
    compiled grammar."""

    # JSON schema: a mapping, JSON text, or a class with `model_json_schema`; kept as text.
    json: str | None = None
    regex: str | None = None  # matches the whole output
    choice: tuple[str, ...] | None = None  # the output is one of these
    grammar: str | None = None  # EBNF whose first rule is `root`
    json_object: bool = False  # any JSON object
    # xgrammar's structural tag, for output that is partly constrained (tool calls); kept as text.
    structural_tag: str | None = None
    # JSON on one line with the separators ", " and ": ", instead of some whitespace.
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        self._set("json", _json("json", _schema_of(self.json)))
        self._set("structural_tag", _json("structural_tag", self.structural_tag))
        self._set("choice", _choice(self.choice))
        for name in ("regex", "grammar"):
            _text(name, getattr(self, name))
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _error(f"{name} must be true or false, got {getattr(self, name)!r:.80}", name)
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = " and ".join(given) if given else "none"
            raise _error(f"exactly one of {', '.join(KINDS)} must be given, got {got}")

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def kind(self) -> str:
        """Which of the six is set."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @classmethod
    def make(cls, value: Any) -> StructuredOutputsParams:
        """From a mapping with the same keys, or an instance. Raises `RequestError`."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _error(
                "must be a StructuredOutputsParams or a mapping, got " + type(value).__name__
            )
        for key in value:
            if key not in cls.__struct_fields__:
                hint = nearest(str(key), cls.__struct_fields__)
                raise _error(f"unknown key {str(key)!r:.80}: {hint}", str(key))
        return cls(**{key: item for key, item in value.items() if item is not None})


def _error(message: str, name: str = "") -> RequestError:
    known = name in StructuredOutputsParams.__struct_fields__
    return RequestError(f"{PARAM}: {message}", param=f"{PARAM}.{name}" if known else PARAM)


def _schema_of(value: Any) -> Any:
    """A pydantic model's schema; anything else as it is."""
    if isinstance(value, type) and hasattr(value, "model_json_schema"):
        return value.model_json_schema()
    return value


def _json(name: str, value: Any) -> str | None:
    """The value as JSON text. The order of keys is kept: it is the order of properties."""
    if value is None:
        return None
    return _checked_json(name, value) if isinstance(value, str) else _written(name, value)


@lru_cache(maxsize=64)  # a specification is checked again wherever a message with it is decoded
def _checked_json(name: str, value: str) -> str:
    return _written(name, value)


def _written(name: str, value: Any) -> str:
    if isinstance(value, str):
        _text(name, value)
        try:
            value = json_text.loads(value)
        except (ValueError, RecursionError) as error:
            reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
            raise _error(f"{name} is not valid JSON: {reason}", name) from None
    if not isinstance(value, Mapping | bool) or (name != "json" and isinstance(value, bool)):
        raise _error(f"{name} must be a JSON object, got {type(value).__name__}", name)
    _check_depth(name, value)
    try:
        text = json_text.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _error(f"{name} cannot be serialized as JSON: {error}", name) from None
    _text(name, text)
    return text


def _check_depth(name: str, value: Any) -> None:
    """Breadth-first, so that a deep value cannot exhaust the stack."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _error(f"{name} is nested too deep (limit {MAX_DEPTH} levels)", name)
        below: list[Any] = []
        for item in level:
            if isinstance(item, Mapping):
                below += item.values()
            elif isinstance(item, list | tuple):
                below += item
        level = [item for item in below if isinstance(item, Mapping | list | tuple)]


def _choice(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    if isinstance(value, str) or not isinstance(value, list | tuple):
        raise _error(f"choice must be a list of strings, got {type(value).__name__}", "choice")
    if not value:
        raise _error("choice must not be empty", "choice")
    for item in value:
        _text("choice", item)
    if sum(map(len, value)) > MAX_BYTES:
        raise _error(f"choice is too long (limit {MAX_BYTES} bytes)", "choice")
    return tuple(value)


def _text(name: str, value: Any) -> None:
    """Raise for anything but a non-empty, valid string of at most `MAX_BYTES`."""
    if value is None:
        return
    if not isinstance(value, str):
        raise _error(f"{name} must be a string, got {type(value).__name__}", name)
    if not value:
        raise _error(f"{name} must not be empty", name)
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise _error(f"{name} is not valid Unicode (lone surrogate)", name) from None
    if size > MAX_BYTES:
        raise _error(f"{name} is too long: {size} bytes (limit {MAX_BYTES})", name)
    if "\0" in value:
        raise _error(f"{name} must not contain U+0000", name)
