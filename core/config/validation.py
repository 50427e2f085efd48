"""Turns pydantic's errors into Octavo's: path, expected, got, and the nearest known key."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from octavo.core.config.models import ImplementationConfig
from octavo.core.config.origin import Path, dotted
from octavo.core.errors import nearest

_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "none": "null",
}


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


@dataclass(frozen=True)
class Problem:
    """One invalid value."""

    path: Path
    message: str


def problems(
    error: ValidationError, model: type[BaseModel], data: Any, thing: str = "key"
) -> list[Problem]:
    """The problems that `error` reports in `data`, one per path; branches of a union are merged.

    thing: what messages call a key ("key", "option").
    """
    merged: dict[Path, list[Any]] = {}
    for item in error.errors(include_url=False):
        merged.setdefault(_data_path(item["loc"], data, item["type"]), []).append(item)
    return [
        Problem(path, _message(path, items, model, data, thing)) for path, items in merged.items()
    ]


def _data_path(loc: Sequence[str | int], data: Any, kind: str) -> Path:
    """`loc` without the tags that pydantic adds for branches of unions."""
    path: list[str | int] = []
    for position, part in enumerate(loc):
        last = position == len(loc) - 1
        inside, below = _step(data, part)
        if inside:
            data = below
        elif not (last and kind == "missing"):
            continue
        path.append(part)
    return tuple(path)


def _message(path: Path, items: list[Any], model: type[BaseModel], data: Any, thing: str) -> str:
    first = items[0]
    if first["type"] in ("extra_forbidden", "invalid_key"):
        return f"unknown {thing}; {suggest(path, model)}"
    if first["type"] == "missing":
        return f"required {thing} is missing"
    if first["type"] == "value_error" and not str(first["ctx"]["error"]).startswith("expected "):
        return str(first["ctx"]["error"])
    expected = list(dict.fromkeys(_expected(item) for item in items))
    return f"expected {' or '.join(expected)}, got {show(_at(data, path))}"


def _expected(item: Any) -> str:
    kind: str = item["type"]
    context: Mapping[str, Any] = item.get("ctx", {})
    if kind in ("literal_error", "enum"):
        return str(context["expected"])
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"{word} {context[key]}"
    if kind == "value_error":
        text = str(context["error"])
        return text.removeprefix("expected ")
    stem = kind.split("_", maxsplit=1)[0]
    if kind.endswith(("_type", "_parsing", "_from_float", "_required")) and stem in _EXPECTED:
        return _EXPECTED[stem]
    message = str(item["msg"]).removeprefix("Input should be ")
    return message[:1].lower() + message[1:]


_BOUNDS = {
    "greater_than": ("a number >", "gt"),
    "greater_than_equal": ("a number >=", "ge"),
    "less_than": ("a number <", "lt"),
    "less_than_equal": ("a number <=", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def show(value: Any) -> str:
    """A value as YAML, shortened for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return _SHORT.repr(value)


def _at(data: Any, path: Path) -> Any:
    for part in path:
        data = _step(data, part)[1]
    return data


def _step(data: Any, part: str | int) -> tuple[bool, Any]:
    """Whether `part` is a key or an index of `data`, and the value there."""
    if isinstance(data, Mapping) and part in data:
        return True, data[part]
    if isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
        return True, data[part]
    return False, None


def suggest(path: Path, model: type[BaseModel]) -> str:
    """A hint for an unknown key: the nearest one in its section, else the same name elsewhere."""
    name = str(path[-1]) if path else ""
    section = model_at(model, path[:-1])
    known = list(section.model_fields) if section else []
    hint = nearest(name, known)
    if hint.startswith("did you mean"):
        return hint
    elsewhere = [key for key in all_keys(model) if key.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    return hint


def model_at(model: type[BaseModel], path: Iterable[str | int]) -> type[BaseModel] | None:
    """The model that holds the keys at `path`, or None where there is none."""
    found: type[BaseModel] | None = model
    for part in path:
        if isinstance(part, int):
            continue
        if found is None or part not in found.model_fields:
            return None
        found = _model_in(found.model_fields[part].annotation)
    return found


def all_keys(model: type[BaseModel], prefix: Path = ()) -> Iterator[str]:
    """Every dotted key of a model and of the models below it."""
    for name, field in model.model_fields.items():
        yield dotted((*prefix, name))
        below = _model_in(field.annotation)
        if below is not None and below is not ImplementationConfig:
            yield from all_keys(below, (*prefix, name))


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, tuple):
        for part in get_args(annotation):
            below = _model_in(part)
            if below is not None:
                return below
    return None
