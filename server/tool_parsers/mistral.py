"""Tool parser `mistral`: what follows `[TOOL_CALLS]`.

Either an array of `{"name": ..., "arguments": {...}}`, or, from version 11 of Mistral's tokenizers
on, `name[ARGS]{...}` (also `name{...}`, and with a `[CALL_ID]` between) after a mark of its own for
every call.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    ToolEvent,
    ToolParser,
    ToolParserContext,
)
from octavo.server.tool_parsers.json_calls import JsonCalls, Style
from octavo.server.tool_parsers.json_object import ObjectReader
from octavo.server.tool_parsers.options import JsonParserOptions
from octavo.server.tool_parsers.stream import (
    Region,
    TextWithCalls,
    first_of,
    partial,
    whole_call,
)

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
STYLE = Style(lists=True)
_LONGEST_HEAD = 256
_HEAD = re.compile(
    r"\s*([A-Za-z0-9_.-]+)\s*(?:\[CALL_ID\][A-Za-z0-9_-]*\s*)?(?:\[ARGS\]\s*)?(?=\{)"
)
_LETTERS = string.ascii_letters + string.digits


class MistralParser(ToolParser):
    """Ids of calls have nine letters or digits: Mistral's templates refuse others."""

    special_tokens = (CALLS, ARGS, CALL_ID)

    def __init__(self, options: JsonParserOptions, context: ToolParserContext) -> None:
        self._eager = options.stream_arguments

    def begin(self, tools: Sequence[Mapping[str, Any]]) -> TextWithCalls:
        return TextWithCalls(
            lambda text, at_line: first_of((CALLS,), text),
            lambda text, at_line: partial((CALLS,), text),
            lambda: MistralCalls(self._eager),
        )

    def call_id(self) -> str:
        return "".join(secrets.choice(_LETTERS) for _ in range(9))


class MistralCalls(Region):
    """Looks at the first character to know which of the two forms it is."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self._eager = eager
        self._space = ""
        self._inner: Region | None = None

    def feed(self, text: str) -> list[ToolEvent]:
        if self._inner is None:
            text = self._space + text
            word = text.lstrip()
            if not word:
                self._space = text
                return []
            is_json = word[0] in "[{"
            self._inner = JsonCalls(STYLE, eager=self._eager) if is_json else NamedCall(self._eager)
        return self._done(self._inner.feed(text))

    def finish(self, truncated: bool) -> list[ToolEvent]:
        if self._inner is None:
            self.failed = self._space
            return []
        return self._done(self._inner.finish(truncated))

    def _done(self, events: list[ToolEvent]) -> list[ToolEvent]:
        assert self._inner is not None, "a form was chosen"
        self.rest, self.failed, self.calls = self._inner.rest, self._inner.failed, self._inner.calls
        return events


class NamedCall(Region):
    """One call, `name[ARGS]{...}`."""

    def __init__(self, eager: bool) -> None:
        super().__init__()
        self._eager = eager
        self._raw: list[str] = []
        self._name: str | None = None
        self._reader = ObjectReader(value_of="arguments")
        self._begun = False
        self._sent = 0  # pieces of the arguments that were given out

    def feed(self, text: str) -> list[ToolEvent]:
        self._raw.append(text)
        place = 0
        if self._name is None:
            text = "".join(self._raw)
            head = _HEAD.match(text[:_LONGEST_HEAD])
            if head is None:
                if _hopeless(text):
                    self.failed = text
                return []
            self._name, place = head[1], head.end()
        stop = place if self._reader.bad else self._reader.feed(text, place)
        events: list[ToolEvent] = []
        if self._reader.done and not self._begun:
            events = whole_call(self._name, self._reader.members["arguments"].text)
        elif self._reader.bad and not self._eager:
            self.failed = "".join(self._raw)
        elif self._eager:
            events = self._more(self._name, text[stop:] if self._reader.bad else "")
            events += [CallEnd()] if self._reader.done else []
        if self._reader.done:
            self.calls, self.rest = 1, text[stop:]
        return events

    def _more(self, name: str, unread: str = "") -> list[ToolEvent]:
        """Arguments that were not given out yet, and what of them cannot be read."""
        pieces = self._reader.members["arguments"].pieces
        new, self._sent = pieces[self._sent :], len(pieces)
        events: list[ToolEvent] = [] if self._begun else [CallBegin(name)]
        self._begun = True
        more = "".join(new) + unread
        return [*events, CallArguments(more)] if more else events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        if self._name is None or not (truncated or self._begun):
            self.failed = "".join(self._raw)
            return []
        events = self._more(self._name, self._reader.unfinished)
        if not truncated:
            events.append(CallEnd())
            self.calls, self.rest = 1, ""
        return events


def _hopeless(text: str) -> bool:
    """Whether this can surely not become a name with arguments any more."""
    rest = text.lstrip()
    name = re.match(r"[A-Za-z0-9_.-]*", rest)
    assert name is not None, "the pattern matches the empty text"
    after = rest[name.end() :].lstrip()
    if len(rest) > _LONGEST_HEAD or (not name[0] and rest):
        return True
    for mark in (CALL_ID, ARGS):
        if mark.startswith(after):
            return False
        if after.startswith(mark):
            after = re.sub(r"^[A-Za-z0-9_-]*\s*", "", after[len(mark) :])
            if not after:
                return False
    return True
