"""Tool parser `pythonic`: `[get_weather(city="Paris"), get_time()]`, a Python list of calls.

The format of Llama 3.2 and 4, of ToolACE and of others. The list counts where it begins a line and
names tools of the request, or follows `<|python_start|>`; arguments are keywords with literals.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from octavo.core.contracts import NoOptions
from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    ToolEvent,
    ToolParser,
    ToolParserContext,
)
from octavo.server.tool_parsers.stream import Region, TextWithCalls, indent, partial, whole_call
from octavo.server.tool_parsers.texts import tool_names, valid_unicode

START, END = "<|python_start|>", "<|python_end|>"
MAX_DEPTH = 64
_OPENING = re.compile(r"<\|python_start\|>|^[ \t]*(?=\[)", re.MULTILINE)
_HEAD = re.compile(r"\s*(?:\[\s*(?:(?P<name>[A-Za-z_][\w.]*)\s*(?P<call>\()?)?)?")
_STRINGS = {quote: re.compile(rf"(?:[^\\{quote}]+|\\.)*+", re.DOTALL) for quote in "'\""}
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicParser(ToolParser):
    """See the module."""

    special_tokens = (START, END)

    def __init__(self, options: NoOptions, context: ToolParserContext) -> None:
        pass

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> TextWithCalls:
        names = tool_names(tools)
        return TextWithCalls(
            find_opening,
            lambda text, at_line: partial((START,), text) or indent(text, at_line),
            lambda: ListOfCalls(names),
        )


def find_opening(text: str, at_line: bool) -> tuple[int, int] | None:
    """A tag, or a bracket that begins a line."""
    for match in _OPENING.finditer(text):
        if at_line or match.start() > 0 or match[0] == START:
            return match.span()
    return None


class ListOfCalls(Region):
    """Finds the end of every call by counting brackets outside of strings, and reads a call when it
    is whole."""

    def __init__(self, known: Collection[str]) -> None:
        super().__init__()
        self._known = known
        self._text = ""
        self._place = 0  # read up to here
        self._begin = 0  # of what belongs to no whole call
        self._depth = 0
        self._quote = ""
        self._commas: list[int] = []  # between its arguments
        self._closed = False  # the list has ended

    def feed(self, text: str) -> list[ToolEvent]:
        self._text += text
        events: list[ToolEvent] = []
        if self._depth == 0 and not self._closed and not self._opens():
            return []
        while self._place < len(self._text) and not self._closed and self.failed is None:
            if not self._outside():
                break
            self._structure(self._text[self._place], events)
            self._place += 1
        if self._closed:
            self._close()
        return events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        if self._closed:
            self.rest = self._text[self._place :]
        elif truncated and self._depth > 1 and (events := self._cut_off()):
            return events
        else:
            self.failed = self._text[self._begin :]
        return []

    def _opens(self) -> bool:
        """Whether `[name(` has come. Sets `failed` when it cannot come any more."""
        head = _HEAD.match(self._text)
        assert head is not None, "the pattern matches the empty text"
        if head["call"]:
            if head["name"] in self._known:
                self._depth = 1
                self._place = self._text.index("[") + 1
                return True
            self.failed = self._text
        elif head.end() < len(self._text):
            self.failed = self._text
        return False

    def _outside(self) -> bool:
        """Move behind the string that is read, if one is. False when more text is needed."""
        text = self._text
        if self._quote and self._place < len(text):
            body = _STRINGS[self._quote].match(text, self._place)
            assert body is not None, "the pattern matches the empty text"
            self._place = body.end()
            if text.startswith(self._quote, self._place):
                self._quote, self._place = "", self._place + 1
        return not self._quote and self._place < len(text)

    def _structure(self, character: str, events: list[ToolEvent]) -> None:
        if character in "'\"":
            self._quote = character
        elif character in "([{":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                self.failed = self._text[self._begin :]
        elif character in ")]}":
            self._depth -= 1
            if self._depth == 1:
                self._whole(events)
            elif self._depth == 0:
                self._closed = character == "]" and self._at_call_end()
                if not self._closed:
                    self.failed = self._text[self._begin :]
        elif character == "," and self._depth == 2:
            self._commas.append(self._place)
        elif character == "," and self._depth == 1 and self._at_call_end():
            self._begin = self._place + 1

    def _at_call_end(self) -> bool:
        """Whether nothing stands between the last call and here."""
        return self.calls > 0 and not self._text[self._begin : self._place].strip()

    def _whole(self, events: list[ToolEvent]) -> None:
        """A call has closed."""
        call = read_call(self._call_text(self._place + 1), self._known)
        if call is None:
            self.failed = self._text[self._begin :]
            return
        events += whole_call(*call)
        self.calls += 1
        self._begin, self._commas = self._place + 1, []

    def _call_text(self, stop: int) -> str:
        """From where the call begins."""
        text = self._text[self._begin : stop]
        return text if self.calls else text.lstrip().removeprefix("[")

    def _close(self) -> None:
        """After the list: an end tag may follow."""
        rest = self._text[self._place :]
        word = rest.lstrip()
        if word.startswith(END):
            self.rest = word[len(END) :]
        elif not END.startswith(word):
            self.rest = rest

    def _cut_off(self) -> list[ToolEvent]:
        """The last call, with the arguments that are whole. Nothing where what is open is none."""
        bracket = self._text.find("(", self._begin)
        if bracket < 0:
            return []
        stop = self._commas[-1] if self._commas else bracket + 1
        call = read_call(self._call_text(stop) + ")", self._known)
        if call is None:
            return []
        return [CallBegin(call[0]), CallArguments(call[1][:-1])]


def read_call(text: str, known: Collection[str]) -> tuple[str, str] | None:
    """Name and arguments (as JSON) of one call of a known tool; None when it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that Python does not know
            call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(call, ast.Call) or call.args:
        return None
    name = ast.unparse(call.func)
    try:
        arguments = {str(each.arg): _literal(each.value) for each in call.keywords if each.arg}
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if len(arguments) != len(call.keywords) or name not in known:
        return None
    return name, text if valid_unicode(text) else json.dumps(arguments)


def _literal(node: ast.expr) -> Any:
    """A literal as JSON has it. Raises `ValueError` for what is none."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(k): _literal(v) for k, v in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise ValueError("not a literal")


def _key(node: ast.expr | None) -> str:
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.Constant(value=int() | float() as value):
            return json.dumps(value)
    raise ValueError("not the name of a member")
