"""JSON schemas for xgrammar: what it would pass over in silence is rewritten, or refused by name.

A schema that is taken is kept to: every output that ends by itself validates. Where JSON Schema
allows more than is generated (properties in another order, unanchored patterns), the output is one
of what is allowed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM
from octavo.plugins.grammar_engines.patterns import mark

MAX_MULTIPLES = 1024
"""Most values that `multipleOf` may stand for."""

_REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "$dynamicRef",
    "$recursiveRef",
)
_BY_TYPE = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "unevaluatedProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "minItems",
        "maxItems",
        "uniqueItems",
    ),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "string": ("pattern", "minLength", "maxLength", "format"),
}
_CHOOSING = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref")
_CONSTRAINING = {word for words in _BY_TYPE.values() for word in words} | set(_CHOOSING)
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "additionalItems",
    "propertyNames",
)
_DESCRIBING = (
    "properties",
    "patternProperties",
    "propertyNames",
    "additionalProperties",
    "unevaluatedProperties",
    *_CHOOSING,
)
_TYPES = {"object", "array", "string", "number", "integer", "boolean", "null"}
_UNSAFE_ESCAPES = '\\"ntrfv0xuc'


def prepared_schema(text: str) -> tuple[Any, list[str]]:
    """The schema that xgrammar gets, as a mapping with marks in the place of patterns, and the
    patterns. Raises `RequestError` for what is not supported, with the place in the schema."""
    schema = json.loads(text)
    if schema is False:
        raise _error("#", "the schema false allows nothing")
    walker = _Walker(schema)
    return {} if schema is True else walker.schema(schema, "#"), walker.patterns


def _error(place: str, message: str) -> RequestError:
    return RequestError(f"{PARAM}: json: {place}: {message}", param=f"{PARAM}.json")


class _Walker:
    """Rewrites a schema from its root down; `place` is a JSON pointer, for messages."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.patterns: list[str] = []

    def schema(self, schema: Any, place: str) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _error(place, f"a schema must be an object or a boolean, got {schema!r:.80}")
        out = dict(schema)
        for word in _REFUSED:
            if word in out:
                raise _error(place, f"'{word}' is not supported")
        self._check_choosing(out, place)
        self._tuple_items(out, place)
        self._infer_type(out, place)
        self._strings(out, place)
        _arrays(out, place)
        _multiples(out, place)
        _enumerated(out, place)
        self._required(out, place)
        for word in _MAPS:
            if word in out:
                members = _mapping(out[word], f"{place}/{word}")
                out[word] = {
                    name: self.schema(item, f"{place}/{word}/{name}")
                    for name, item in members.items()
                }
        if "patternProperties" in out:
            out["patternProperties"] = {
                self._marked(name, f"{place}/patternProperties"): item
                for name, item in out["patternProperties"].items()
            }
        for word in _LISTS:
            if word in out:
                if not isinstance(out[word], list) or not out[word]:
                    raise _error(place, f"'{word}' must be a non-empty array")
                out[word] = [
                    self.schema(item, f"{place}/{word}/{i}") for i, item in enumerate(out[word])
                ]
        for word in _SINGLE:
            if word in out:
                out[word] = self.schema(out[word], f"{place}/{word}")
        return out

    def _check_choosing(self, out: dict[str, Any], place: str) -> None:
        """A keyword that stands for a whole schema takes no other constraint beside it."""
        chosen = [word for word in _CHOOSING if word in out]
        if not chosen:
            return
        word = chosen[0]
        beside = sorted(other for other in out if other in _CONSTRAINING and other != word)
        if beside:
            raise _error(
                place, f"'{word}' together with '{beside[0]}' is not supported: merge them"
            )
        if word == "allOf" and (not isinstance(out[word], list) or len(out[word]) != 1):
            raise _error(place, "'allOf' of several schemas is not supported: merge them")
        if word == "$ref":
            reference = out[word]
            if not isinstance(reference, str) or not (
                reference == "#" or reference.startswith("#/")
            ):
                raise _error(
                    place,
                    f"'$ref' must point into the schema (#/...), got {reference!r:.80}",
                )
        if "type" in out and word not in ("enum", "const"):
            self._push_down(out, word, place)

    def _push_down(self, out: dict[str, Any], word: str, place: str) -> None:
        """A type beside alternatives that all say the same type says nothing more."""
        parts = out[word] if isinstance(out[word], list) else [self._target(out[word], place)]
        if not all(isinstance(part, Mapping) for part in parts):
            raise _error(place, f"'{word}' together with 'type' must be of objects")
        types = [part.get("type") for part in parts]
        if any(kind != out["type"] for kind in types):
            if word == "$ref" or any(kind is not None for kind in types):
                raise _error(place, f"'{word}' together with 'type' is not supported: merge them")
            out[word] = [{**part, "type": out["type"]} for part in parts]
        del out["type"]

    def _target(self, reference: Any, place: str) -> Any:
        found = self._root
        for part in str(reference).removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or key not in found:
                raise _error(place, f"'$ref' points to nothing: {reference!r:.80}")
            found = found[key]
        return found

    def _tuple_items(self, out: dict[str, Any], place: str) -> None:
        """Tuples as drafts before 2020-12 wrote them."""
        if isinstance(out.get("items"), list):
            if "prefixItems" in out:
                raise _error(place, "'items' must be a schema beside 'prefixItems'")
            out["prefixItems"] = out.pop("items")
            out["items"] = out.pop("additionalItems", True)
        out.pop("additionalItems", None)

    def _infer_type(self, out: dict[str, Any], place: str) -> None:
        """Constraints without a type count for that type only; the output has it."""
        groups = [kind for kind, words in _BY_TYPE.items() if any(word in out for word in words)]
        given = out.get("type")
        if given is None:
            if len(groups) > 1:
                raise _error(place, f"'type' is missing: is it {' or '.join(groups)}?")
            if groups:
                out["type"] = groups[0]
            return
        kinds = given if isinstance(given, list) else [given]
        for kind in kinds:
            if not isinstance(kind, str) or kind not in _TYPES:
                raise _error(place, f"'type' must be one of {', '.join(sorted(_TYPES))}")
        if not kinds:
            raise _error(place, "'type' must not be empty")

    def _strings(self, out: dict[str, Any], place: str) -> None:
        lengths = [word for word in ("minLength", "maxLength") if word in out]
        for word in ("pattern", "format"):
            if word in out and lengths:
                raise _error(place, f"'{word}' together with '{lengths[0]}' is not supported")
        if "pattern" in out and "format" in out:
            raise _error(place, "'pattern' together with 'format' is not supported")
        if "pattern" in out:
            out["pattern"] = self._marked(out["pattern"], place)

    def _marked(self, pattern: Any, place: str) -> str:
        """What stands for a pattern."""
        _check_pattern(pattern, place)
        self.patterns.append(pattern)
        return mark(len(self.patterns) - 1)

    def _required(self, out: dict[str, Any], place: str) -> None:
        """A required property that is not described is one of the additional ones."""
        required = out.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise _error(place, "'required' must be an array of strings")
        properties = dict(_mapping(out.get("properties", {}), f"{place}/properties"))
        missing = [name for name in required if name not in properties]
        if out.get("type") == "object" and not any(word in out for word in _DESCRIBING):
            out["additionalProperties"] = True  # nothing is said of its properties
        if not missing:
            return
        rest = out.get("additionalProperties", out.get("unevaluatedProperties", True))
        if rest is False or "patternProperties" in out or "propertyNames" in out:
            raise _error(place, f"'{missing[0]}' is required and not described in 'properties'")
        out["properties"] = properties | dict.fromkeys(missing, rest)


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(place, f"must be an object, got {value!r:.80}")
    return value


def _arrays(out: dict[str, Any], place: str) -> None:
    """More items than are described may be anything (xgrammar would allow no more)."""
    if out.get("uniqueItems") not in (None, False):
        raise _error(place, "'uniqueItems' is not supported")
    out.pop("uniqueItems", None)
    described = out.get("prefixItems", [])
    if "items" in out or "unevaluatedItems" in out or not isinstance(described, list):
        return
    counts = [out[word] for word in ("minItems", "maxItems") if isinstance(out.get(word), int)]
    if any(count > len(described) for count in counts):
        out["items"] = True


def _check_pattern(pattern: Any, place: str) -> None:
    """A pattern is matched against the string as JSON writes it: refuse what is written with a
    backslash there. (Inside brackets such characters are left out.)"""
    if not isinstance(pattern, str):
        raise _error(place, f"'pattern' must be a string, got {pattern!r:.80}")
    index, in_class = 0, False
    while index < len(pattern):
        character = pattern[index]
        escaped = character == "\\"
        if escaped:
            index += 1
            character = pattern[index : index + 1]
        unsafe = character in _UNSAFE_ESCAPES if escaped else character == '"' or character < " "
        if pattern.startswith(("(?=", "(?!", "(?<"), index) and not escaped and not in_class:
            raise _error(place, "lookahead, lookbehind and named groups are not supported")
        if not in_class and unsafe:
            raise _error(
                place,
                "a pattern may hold quotes, backslashes, control characters and numeric escapes "
                "only in brackets",
            )
        if not escaped:
            in_class = (in_class or character == "[") and character != "]"
        index += 1


def _multiples(out: dict[str, Any], place: str) -> None:
    """`multipleOf` between two bounds is a choice of numbers."""
    if "multipleOf" not in out:
        return
    try:
        step = Decimal(str(out["multipleOf"]))
        low, high = (Decimal(str(out[word])) for word in _inclusive(out, place))
    except (ArithmeticError, KeyError):
        raise _error(
            place, "'multipleOf' is supported with 'minimum' and 'maximum' (all numbers) only"
        ) from None
    if step <= 0 or not all(map(math.isfinite, (low, high))):
        raise _error(place, "'multipleOf' must be over 0, and its bounds finite")
    try:
        first, last = math.ceil(low / step), math.floor(high / step)
    except ArithmeticError:
        raise _error(place, "'multipleOf' is too small for its bounds") from None
    if last - first >= MAX_MULTIPLES:
        raise _error(place, f"'multipleOf' allows over {MAX_MULTIPLES} values here")
    values = [step * i for i in range(first, last + 1)]
    wanted = out.get("type")
    numbers = [int(v) if v == v.to_integral_value() else float(v) for v in values]
    if wanted == "integer":
        numbers = [number for number in numbers if isinstance(number, int)]
    if not numbers:
        raise _error(place, "'multipleOf' allows no value between its bounds")
    for word in ("multipleOf", "minimum", "maximum", "type"):
        out.pop(word, None)
    out["enum"] = numbers


def _inclusive(out: dict[str, Any], place: str) -> tuple[str, str]:
    if "exclusiveMinimum" in out or "exclusiveMaximum" in out:
        raise _error(place, "'multipleOf' with exclusive bounds is not supported")
    if out.get("type") not in ("integer", "number"):
        raise _error(place, "'multipleOf' needs type integer or number alone")
    return "minimum", "maximum"


def _enumerated(out: dict[str, Any], place: str) -> None:
    """Values that a type beside them rules out."""
    if "enum" not in out:
        return
    values = out["enum"]
    if not isinstance(values, list) or not values:
        raise _error(place, "'enum' must be a non-empty array")
    if "type" in out:
        given = out.pop("type")
        kinds = given if isinstance(given, list) else [given]
        out["enum"] = [value for value in values if any(_is(value, kind) for kind in kinds)]
        if not out["enum"]:
            raise _error(place, f"no value of 'enum' is of type {given}")


def _is(value: Any, kind: str) -> bool:
    """Whether a JSON value is of a JSON Schema type."""
    if isinstance(value, bool):
        return kind == "boolean"
    match kind:
        case "null":
            return value is None
        case "string":
            return isinstance(value, str)
        case "number":
            return isinstance(value, int | float)
        case "integer":
            return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        case "array":
            return isinstance(value, list)
        case _:
            return kind == "object" and isinstance(value, Mapping)
