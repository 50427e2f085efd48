"""`ObjectReader`: one JSON object, read and checked as it comes."""

from __future__ import annotations

import re

MAX_DEPTH = 128
"""Deepest nesting that is read; what is deeper counts as malformed."""

_SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_CONTROL = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_SCALAR_CHARACTERS = frozenset("0123456789+-.eE" + "truefalsn")


class Member:
    """A member's value as far as it came, in pieces."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.closed = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ObjectReader:
    """Checks the object's JSON character by character, and keeps the text of its members.

    done, bad: the object has ended, or is none. members: by name, the first one of a name counts.
    Control characters inside strings, which JSON forbids and models write, come out escaped;
    everything else as written. value_of: read one value alone, as the member of this name.
    """

    def __init__(self, value_of: str | None = None) -> None:
        self.done = self.bad = False
        self.members: dict[str, Member] = {}
        self._stack: list[str] = []  # open brackets
        self._expect = "object"
        self._key: list[str] | None = None  # pieces of a member's name, while it is read
        self._member: Member | None = None  # the member whose value is read
        self._in_key = False  # whether the string that is read names a member, at any depth
        self._scalar = ""
        self._escape = ""
        self._alone = value_of is not None
        if value_of is not None:
            self._stack, self._expect = ["{"], "value"
            self._member = self.members[value_of] = Member()

    def value(self, *names: str) -> Member | None:
        """The first member with one of these names."""
        return next((member for name, member in self.members.items() if name in names), None)

    @property
    def unfinished(self) -> str:
        """What was read of a number, a word or an escape, and is in no member yet."""
        return {"scalar": self._scalar, "escape": self._escape}.get(self._expect, "")

    def feed(self, text: str, start: int = 0) -> int:
        """Read from `start` on. Returns where it stopped: at the end, behind the object, or at the
        character that does not belong there."""
        place = start
        while place < len(text) and not (self.done or self.bad):
            match self._expect:
                case "string":
                    place = self._string(text, place)
                case "escape":
                    place = self._escaped(text, place)
                case "scalar":
                    place = self._in_scalar(text, place)
                case _:
                    place = self._structure(text, place)
        return place

    def _keep(self, piece: str) -> None:
        if self._key is not None:
            self._key.append(piece)
        elif self._member is not None:
            self._member.pieces.append(piece)

    def _string(self, text: str, place: int) -> int:
        plain = _PLAIN.match(text, place)
        if plain is not None:
            self._keep(plain[0])
            return plain.end()
        character = text[place]
        if character == '"':
            self._keep('"')
            self._end_string()
        elif character == "\\":
            self._escape, self._expect = "\\", "escape"
        else:
            self._keep(_CONTROL.get(character) or f"\\u{ord(character):04x}")
        return place + 1

    def _escaped(self, text: str, place: int) -> int:
        """One character of an escape, which is kept whole."""
        character = text[place]
        allowed = '"\\/bfnrtu' if len(self._escape) == 1 else "0123456789abcdefABCDEF"
        if character not in allowed:
            self.bad = True
            return place
        self._escape += character
        if len(self._escape) == (6 if self._escape[1] == "u" else 2):
            self._keep(self._escape)
            self._expect = "string"
        return place + 1

    def _end_string(self) -> None:
        if self._key is not None and len(self._stack) == 1:
            name = "".join(self._key)[1:-1]
            self._key = None
            self._member = Member()
            self.members.setdefault(name, self._member)
            self._expect = "colon"
        elif self._in_key:
            self._expect = "colon"
        else:
            self._end_value()

    def _in_scalar(self, text: str, place: int) -> int:
        character = text[place]
        if character in _SCALAR_CHARACTERS and len(self._scalar) < 400:
            self._scalar += character
            return place + 1
        if _SCALAR.fullmatch(self._scalar) is None:
            self.bad = True
            return place
        self._keep(self._scalar)
        self._end_value()
        return place

    def _structure(self, text: str, place: int) -> int:
        character, expect = text[place], self._expect
        if character in _SPACE:
            if self._member is not None and self._member.pieces:
                self._keep(character)
            return place + 1
        if expect == "object" and character == "{":
            self._open(character)
        elif expect in ("value", "value or ]") and character in "{[":
            self._keep(character)
            self._open(character)
        elif expect in ("value", "value or ]") and character == '"':
            self._keep(character)
            self._in_key, self._expect = False, "string"
        elif expect in ("value", "value or ]") and character in _SCALAR_CHARACTERS:
            self._scalar, self._expect = character, "scalar"
        elif expect in ("key", "key or }") and character == '"':
            if len(self._stack) == 1:
                self._key = []
            self._keep(character)
            self._in_key, self._expect = True, "string"
        elif expect == "colon" and character == ":":
            if len(self._stack) > 1:
                self._keep(character)
            self._expect = "value"
        elif (expect == "after" and character in "]}") or expect.endswith(f"or {character}"):
            return place + self._close(character)
        elif expect == "after" and character == ",":
            if len(self._stack) > 1:
                self._keep(character)
            self._expect = "key" if self._stack[-1] == "{" else "value"
        else:
            self.bad = True
            return place
        return place if self.bad else place + 1

    def _open(self, bracket: str) -> None:
        if len(self._stack) == MAX_DEPTH:
            self.bad = True
            return
        self._stack.append(bracket)
        self._expect = "key or }" if bracket == "{" else "value or ]"

    def _close(self, bracket: str) -> int:
        """Returns how many characters are taken: none when the bracket is a wrong one."""
        if self._stack[-1] != {"}": "{", "]": "["}[bracket]:
            self.bad = True
            return 0
        self._stack.pop()
        if not self._stack:
            self.done = True
        else:
            self._keep(bracket)
            self._end_value()
        return 1

    def _end_value(self) -> None:
        self._expect = "after"
        if len(self._stack) == 1 and self._member is not None:
            self._member.closed = True
            self._member = None
            self.done = self._alone
