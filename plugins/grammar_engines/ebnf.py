"""Grammars in xgrammar's EBNF, as text."""

from __future__ import annotations

from collections.abc import Sequence

_INTEGER = '"0" | "-"? [1-9] [0-9]{0, 18}'
_NUMBER = '"-"? ("0" | [1-9] [0-9]{0, 18}) ("." [0-9]{1, 18})? ([eE] [+\\-]? [0-9]{1, 3})?'
_BOUNDED = {"basic_integer": _INTEGER, "basic_number": _NUMBER}


def bounded_numbers(grammar: str) -> str:
    """A grammar of JSON, as xgrammar prints it, whose numbers end: at most 19 digits before and 18
    after the point, and 3 in the exponent, which no float64 and no 64-bit integer exceeds. A model
    that has begun to repeat a digit would otherwise repeat it for ever."""
    lines = []
    for line in grammar.splitlines():
        name, arrow, _ = line.partition(" ::= ")
        if arrow and name in _BOUNDED:
            line = f"{name} ::= {_BOUNDED[name]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


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
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x80 else f"\\U{code:08x}"
