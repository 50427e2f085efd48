"""`JsonCalls`: calls written as JSON objects with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from octavo.server.contracts.tool_parser import CallArguments, CallBegin, CallEnd, ToolEvent
from octavo.server.tool_parsers.json_object import Member, ObjectReader
from octavo.server.tool_parsers.stream import Region, whole_call
from octavo.server.tool_parsers.texts import valid_unicode

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Style:
    """How objects follow one another. end: what closes the region, if anything does. lists: whether
    they may stand in a JSON array. separators: what may stand between two of them; without any
    there is one object only (or one array)."""

    end: str = ""
    lists: bool = False
    separators: str = ""


class JsonCalls(Region):
    """known: names of tools, where only those make an object a call. eager: give arguments out as
    they come; then what is malformed in them can no longer become text, and they are given as they
    were written, up to the end of the region."""

    def __init__(
        self, style: Style, *, known: Collection[str] | None = None, eager: bool = False
    ) -> None:
        super().__init__()
        self._style, self._known, self._eager = style, known, eager
        self._raw: list[str] = []  # since the last whole call
        self._reader: ObjectReader | None = None
        self._in_list = self._list_closed = self._spoilt = False
        self._seen = ""
        self._name: str | None = None  # of the call that was begun (eager)
        self._sent = 0  # pieces of its arguments that were given out

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        place = 0
        while place < len(text) and self.rest is None and self.failed is None:
            if self._spoilt:
                place = self._pass_on(text, place, events)
            elif self._reader is not None:
                place = self._in_object(text, place, self._reader, events)
            else:
                place = self._between(text, place)
        return events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        reader, raw = self._reader, "".join(self._raw)
        events: list[ToolEvent] = []
        if self._spoilt:
            events = [CallArguments(raw)] if raw else []
        elif reader is not None and (truncated or self._name is not None):
            events = self._cut_off(reader)
        if self._name is None and not events:
            self.rest, self.failed = (None, raw) if reader or not self.calls else ("", None)
        elif not truncated:
            events.append(CallEnd())
            self.rest = ""
        return events

    # ---- between objects -------------------------------------------------------------------------

    def _between(self, text: str, place: int) -> int:
        """Look at one character; `_seen` has what came since the last object, without space."""
        style, character = self._style, text[place]
        if character == "{" and self._may_begin():
            self._reader, self._seen = ObjectReader(), ""
            return place
        seen = self._seen if character.isspace() else self._seen + character
        if style.end and self.calls and not self._in_list and style.end.startswith(seen):
            if seen == style.end:
                self.rest = text[place + 1 :]
        elif style.end and self.calls and not self._in_list and seen in ("}", "]"):
            seen = ""  # a bracket too many in front of the end mark
        elif seen == "[" and style.lists and not self.calls and not self._in_list:
            self._in_list, seen = True, ""
        elif seen == "]" and self._in_list and self.calls:
            self._in_list, self._list_closed, seen = False, True, ""
            if not style.end:
                self.rest = text[place + 1 :]
        elif seen and not (self.calls and self._separates(seen)):
            waiting = "".join(self._raw) + text[place:]
            if self.calls and not self._in_list:
                self.rest = waiting
            else:
                self.failed = waiting
            return len(text)
        self._seen = seen
        self._raw.append(character)
        return place + 1

    def _separates(self, seen: str) -> bool:
        if self._list_closed:
            return False
        return seen == "," if self._in_list else len(seen) == 1 and seen in self._style.separators

    def _may_begin(self) -> bool:
        """Whether an object may begin here."""
        if not self.calls:
            return not self._seen
        spaced = bool(self._style.end) and not self._in_list and not self._list_closed
        return self._separates(self._seen) or (spaced and not self._seen)

    # ---- inside an object ------------------------------------------------------------------------

    def _in_object(
        self, text: str, place: int, reader: ObjectReader, events: list[ToolEvent]
    ) -> int:
        stop = reader.feed(text, place)
        self._raw.append(text[place:stop])
        if self._eager:
            events += self._begun(reader)
        if reader.done or (reader.bad and self._is_enough(reader, text[stop])):
            events += self._whole(reader)
            if self.failed is not None:
                self.failed += text[stop:]
                return len(text)
        elif reader.bad:
            if self._name is None:
                self.failed = "".join(self._raw) + text[stop:]
                return len(text)
            self._spoilt = True
            self._raw.clear()
        return stop

    def _is_enough(self, reader: ObjectReader, wrong: str) -> bool:
        """Whether only the object's last bracket is missing: the end mark comes instead, or the
        call was given out already. wrong: the character that does not belong there."""
        members = [reader.members.get("name"), reader.value(*ARGUMENTS)]
        closed = members[0] is not None and all(m is None or m.closed for m in members)
        return closed and (self._name is not None or self._style.end.startswith(wrong))

    def _whole(self, reader: ObjectReader) -> list[ToolEvent]:
        """The object has ended."""
        raw, self._reader = "".join(self._raw), None
        if self._name is not None:
            events: list[ToolEvent] = [CallEnd()]
            self._name, self._sent = None, 0
        else:
            name, arguments = _name(reader), _arguments(reader.value(*ARGUMENTS))
            if name is None or arguments is None or not self._is_known(name):
                self.failed = raw
                return []
            events = whole_call(name, arguments)
        self.calls += 1
        self._raw.clear()
        return events

    def _is_known(self, name: str) -> bool:
        return self._known is None or name in self._known

    def _begun(self, reader: ObjectReader) -> list[ToolEvent]:
        """Eagerly: name and arguments as far as they are known."""
        member = reader.value(*ARGUMENTS)
        if member is None or not member.pieces or member.pieces[0][0] != "{":
            return []
        events: list[ToolEvent] = []
        if self._name is None:
            name = _name(reader)
            if name is None or not self._is_known(name):
                return []
            self._name = name
            events.append(CallBegin(name))
        pieces, self._sent = member.pieces[self._sent :], len(member.pieces)
        if pieces:
            events.append(CallArguments("".join(pieces)))
        return events

    def _cut_off(self, reader: ObjectReader) -> list[ToolEvent]:
        """A call without its end."""
        name, member = self._name or _name(reader), reader.value(*ARGUMENTS)
        if name is None or not self._is_known(name):
            return []
        events: list[ToolEvent] = [] if self._name is not None else [CallBegin(name)]
        if member is not None and member.pieces and member.pieces[0][0] == "{":
            rest = "".join(member.pieces[self._sent :])
            rest += "" if member.closed else reader.unfinished
            if rest:
                events.append(CallArguments(rest))
        return events

    def _pass_on(self, text: str, place: int, events: list[ToolEvent]) -> int:
        """Malformed arguments that were begun already: as they are, up to the end mark."""
        waiting = "".join(self._raw) + text[place:]
        end = self._style.end
        found = waiting.find(end) if end else -1
        if found >= 0:
            self.rest = waiting[found + len(end) :]
            waiting = waiting[:found]
            self.calls += 1
        keep = 0
        if found < 0 and end:
            keep = next((n for n in range(len(end) - 1, 0, -1) if waiting.endswith(end[:n])), 0)
        given = waiting[: len(waiting) - keep]
        self._raw[:] = [waiting[len(waiting) - keep :]]
        if given:
            events.append(CallArguments(given))
        if found >= 0:
            events.append(CallEnd())
        return len(text)


def _name(reader: ObjectReader) -> str | None:
    member = reader.members.get("name")
    if member is None or not member.closed or not member.text.startswith('"'):
        return None
    name: str = json.loads(member.text)
    return name if name and valid_unicode(name) else None


def _arguments(member: Member | None) -> str | None:
    """The JSON text of an object; None when it is none. Models also write the object as a string,
    and null or nothing for no arguments."""
    text = "" if member is None else member.text.rstrip()
    if text.startswith('"'):
        text = json.loads(text).strip()
        inner = ObjectReader()
        if not valid_unicode(text) or (text and (inner.feed(text) != len(text) or not inner.done)):
            return None
    if text in ("", "null"):
        return "{}"
    return text if text.startswith("{") else None
