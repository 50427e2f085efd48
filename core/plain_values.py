"""Strict scalars for configuration and options: `true` and `"64"` are not numbers, `1` is not a
boolean. An integer may be written with a point or an exponent (`1e9`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

LEAST, LARGEST = -(2**63), 2**64 - 1
"""Range of integers that messages between processes can hold."""

_NAMES = {bool: "true or false", int: "an integer", float: "a number"}


def plain_value(value: Any, annotation: Any) -> Any:
    """`value` for a field of this type. Raises `ValueError`, beginning with "expected", for a
    scalar of another type; other values are left to the field."""
    kinds = dict.fromkeys(_kinds(annotation))
    types = {kind for kind in kinds if isinstance(kind, type)}
    if any(issubclass(kind, BaseModel) for kind in types):
        return value
    _check_size(value)
    if not types & set(_NAMES) or not isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, float) and int in types and float not in types and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        fits = bool in types
    else:
        fits = isinstance(value, tuple(types - {bool})) or (
            isinstance(value, int) and float in types
        )
    if fits or value in (kind for kind in kinds if kind not in types and kind is not None):
        return value
    if str in types and not isinstance(value, bool):
        return value
    names = [_name(kind) for kind in kinds if kind is not type(None)]
    raise ValueError(f"expected {' or '.join(names)}")


def _check_size(value: Any) -> None:
    if isinstance(value, Mapping):
        for item in value.values():
            _check_size(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_size(item)
    elif isinstance(value, int) and not LEAST <= value <= LARGEST:
        raise ValueError(f"expected integers from {LEAST} to {LARGEST}")


def _kinds(annotation: Any) -> Iterator[Any]:
    """Types, and the values of literals, that an annotation admits."""
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin is Literal:
        yield from get_args(annotation)
    else:
        yield origin or annotation


def _name(kind: Any) -> str:
    if kind is str:
        return "a string"
    return _NAMES.get(kind) or (kind.__name__ if isinstance(kind, type) else repr(kind))
