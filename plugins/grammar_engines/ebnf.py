"""Grammars in xgrammar's EBNF, as text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from octavo.plugins.grammar_engines.patterns import LITERAL, insert

MAX_DIGITS = 18

_INTEGER = '"0" | "-"? [1-9] [0-9]{0, 18}'
_NUMBER = '"-"? ("0" | [1-9] [0-9]{0, 18}) ("." [0-9]{1, 18})? ([eE] [+\\-]? [0-9]{1, 2})?'
_BOUNDED = {"basic_integer": _INTEGER, "basic_number": _NUMBER}

_DIGIT = "(([0-9]))"
_ANY_CHARACTER = '(([^\\"\\\\\\r\\n]))'
_STRING_CHARACTER = '[^\\0-\\x1f\\"\\\\] | "\\\\" [\\"\\\\/bfnrt]'
_MANY = re.compile(r"(?<!\w)(\w+)\{1, -1\}")


def tightened(
    grammar: str, patterns: Sequence[str] = (), convert: Callable[[str], str] = str
) -> str:
    """A grammar of JSON, as xgrammar prints it, with three things put right.

    Numbers end: at most 19 digits before and 18 after the point, and 2 in the exponent; so do the
    digits of formats. A model that has begun to repeat a digit would otherwise repeat it for ever.
    Strings of a given length hold no bare control characters, which JSON forbids. And patterns take
    the place of their marks (see `patterns.insert`).
    """
    rules = insert(
        [line.partition(" ::= ")[::2] for line in grammar.split("\n") if line], patterns, convert
    )
    digits = {name for name, body in rules if body == _DIGIT}

    def bounded(found: re.Match[str]) -> str:
        return f"{found[1]}{{1, {MAX_DIGITS}}}" if found[1] in digits else found[0]

    lines = []
    for name, body in rules:
        if name in _BOUNDED:
            body = _BOUNDED[name]
        elif body == f"(([0-9] {name}) | ([0-9]))":
            body = f"[0-9]{{1, {MAX_DIGITS}}}"
        elif body == _ANY_CHARACTER:
            body = _STRING_CHARACTER
        else:
            body = _outside_literals(body, bounded)
        lines.append(f"{name} ::= {body}")
    return "\n".join(lines) + "\n"


def _outside_literals(body: str, bounded: Callable[[re.Match[str]], str]) -> str:
    """Bound repeated digits; string literals and character classes stay as they are."""
    parts = LITERAL.split(body)
    for index in range(0, len(parts), 2):
        part = _MANY.sub(bounded, parts[index])
        if part.startswith("*") and index and parts[index - 1] == "[0-9]":
            part = f"{{0, {MAX_DIGITS}}}{part[1:]}"
        parts[index] = part
    return "".join(parts)


def choice(texts: Sequence[str]) -> str:
    """One of these texts."""
    return "root ::= " + " | ".join(map(literal, texts)) + "\n"


def literal(text: str) -> str:
    """A text as a string literal."""
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character.isprintable():
        return character
    return f'\\U{ord(character):08x}" "'  # an escape may swallow digits that follow it
