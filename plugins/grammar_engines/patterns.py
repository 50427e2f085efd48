"""Regular expressions inside JSON strings.

xgrammar 0.2.9 gets some of them wrong there (`a( b*)?` lets `ab` through), and none of them where
they are the whole grammar. So a schema goes to xgrammar with marks in the place of its patterns,
and each mark's rule is replaced by the rules of the pattern itself, whose character classes leave
out what JSON would write with a backslash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from octavo.core.errors import RequestError
from octavo.core.structured_outputs import PARAM

LITERAL = re.compile(r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])')
"""A string literal or a character class, as xgrammar prints them."""

_MARK = re.compile(r'Regex\("OctavoPattern(\d+)x", json_string=true\)')
_ROOT = re.compile(r"(?<!\w)root(\w*)")
_ITEM = re.compile(r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\(.)|(.)", re.S)
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_DIGITS = (0x30, 0x39)
_FORBIDDEN = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0xD800, 0xDFFF))


def mark(number: int) -> str:
    """The pattern that stands for the schema's pattern of this number."""
    return f"OctavoPattern{number}x"


def insert(
    rules: Sequence[tuple[str, str]], patterns: Sequence[str], convert: Callable[[str], str]
) -> list[tuple[str, str]]:
    """Rules (name, body) with the patterns in the place of their marks. convert: a regular
    expression to a grammar as text."""
    out: list[tuple[str, str]] = []
    for name, body in rules:
        found = _MARK.fullmatch(body)
        out += _pattern(name, convert(patterns[int(found[1])])) if found else [(name, body)]
    if any("OctavoPattern" in body for _, body in out):
        raise RequestError(f"{PARAM}: json: a pattern cannot be used where it stands", param=PARAM)
    return out


def _pattern(name: str, grammar: str) -> list[tuple[str, str]]:
    """The rules of a pattern, its root under this name and the others under longer ones."""
    rules = []
    for line in grammar.split("\n"):
        rule, arrow, body = line.partition(" ::= ")
        if not arrow:
            continue
        parts = LITERAL.split(body)
        for index, part in enumerate(parts):
            if index % 2 == 0:
                parts[index] = _ROOT.sub(lambda m: _renamed(name, m[1]), part)
            elif part.startswith("["):
                parts[index] = safe_class(part)
        rules.append((_renamed(name, rule.removeprefix("root")), "".join(parts)))
    return rules


def _renamed(name: str, suffix: str) -> str:
    return f"{name}_pattern{suffix}" if suffix else name


def safe_class(text: str) -> str:
    """A character class without quotes, backslashes, control characters and lone surrogates."""
    inside = text[1:-1]
    if inside.startswith("^"):
        ranges = _without([(0, 0x10FFFF)], [*_ranges(inside[1:]), *_FORBIDDEN])
    else:
        ranges = _without(_ranges(inside), _FORBIDDEN)
    if not ranges:
        raise RequestError(
            f"{PARAM}: json: a pattern's class allows only characters that JSON escapes",
            param=PARAM,
        )
    if ranges == [_DIGITS]:
        return "[0-9]"
    return "[" + "".join(f"\\U{a:08x}" + f"-\\U{b:08x}" * (b > a) for a, b in ranges) + "]"


def _without(
    ranges: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Ranges of code points less others."""
    left = list(ranges)
    for low, high in holes:
        left = [
            part
            for first, last in left
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return left


def _ranges(inside: str) -> list[tuple[int, int]]:
    """First and last code points of a class's items."""
    points: list[int | None] = []  # None is the dash of a range
    for found in _ITEM.finditer(inside):
        code = found[1] or found[2] or found[3]
        if code is not None:
            points.append(int(code, 16))
        elif found[4] is not None:
            points.append(ord(_CONTROL.get(found[4], found[4])))
        else:
            points.append(None if found[5] == "-" else ord(found[5]))
    ranges, index = [], 0
    while index < len(points):
        first = points[index]
        first = ord("-") if first is None else first
        last = points[index + 2] if index + 2 < len(points) else None
        if index + 1 < len(points) and points[index + 1] is None and last is not None:
            ranges.append((first, last))
            index += 3
        else:
            ranges.append((first, first))
            index += 1
    return ranges
