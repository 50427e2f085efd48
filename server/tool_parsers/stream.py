"""What the built-in tool parsers share: text with calls in it.

A `TextWithCalls` looks for the place where calls open and hands the text from there on to a
`Region`, which reads them. What turns out to be no call is text again: its opening is passed on,
and the rest is looked at once more.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolStream,
)


def whole_call(name: str, arguments: str) -> list[ToolEvent]:
    """The events of a call that is known whole."""
    return [CallBegin(name), CallArguments(arguments), CallEnd()]


class Region(ABC):
    """Reads calls from where they open to where they close.

    rest: what follows the calls, once they have closed. failed: what was read since the last whole
    call and is none; the opening itself excluded when there was no call yet.
    """

    def __init__(self) -> None:
        self.rest: str | None = None
        self.failed: str | None = None
        self.calls = 0

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """Read on. Nothing comes after `rest` or `failed` is set."""

    @abstractmethod
    def finish(self, truncated: bool) -> list[ToolEvent]:
        """The answer ends here. Sets `rest` or `failed`, or gives what there is of a call that was
        cut off."""


class TextWithCalls(ToolStream):
    """find: the place where calls open in a text, as (start of the opening, its end), or None;
    it is told whether the text is at the start of a line. hold: how many of the last characters
    may still become an opening. Space before the first word of the answer, or of what follows a
    call, is kept only where a word comes."""

    def __init__(
        self,
        find: Callable[[str, bool], tuple[int, int] | None],
        hold: Callable[[str, bool], int],
        region: Callable[[], Region],
    ) -> None:
        self._find, self._hold, self._make = find, hold, region
        self._text = ""  # not looked at yet, or held back
        self._space = ""
        self._words = False  # whether this stretch of text has any
        self._blank_line = True  # whether the last line has nothing but space so far
        self._region: Region | None = None
        self._opening = ""
        self._any_call = False

    def feed(self, text: str) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        self._text += text
        while self._text and self._advance(events):
            pass
        return events

    def finish(self, truncated: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while self._region is not None:
            region = self._region
            events += region.finish(truncated)
            if region.rest is None and region.failed is None:
                return events
            self._leave(region, events)
            while self._text and self._advance(events):
                pass
        self._write(self._text, events)
        if self._space and not self._any_call:
            events.append(Text(self._space))
        return events

    def _advance(self, events: list[ToolEvent]) -> bool:
        """One step through `_text`. Returns False when more text is needed."""
        if self._region is not None:
            text, self._text = self._text, ""
            events += self._region.feed(text)
            self._leave(self._region, events)
            return True
        at_line = self._blank_line
        found = self._find(self._text, at_line)
        if found is None:
            keep = len(self._text) - self._hold(self._text, at_line)
            text, self._text = self._text[:keep], self._text[keep:]
            self._write(text, events)
            return False
        start, end = found
        self._write(self._text[:start], events)
        self._opening, self._text = self._text[start:end], self._text[end:]
        self._region = self._make()
        return True

    def _leave(self, region: Region, events: list[ToolEvent]) -> None:
        if region.calls:
            self._any_call = True
            self._space, self._words = "", False
        if region.rest is not None:
            self._region, self._text, self._blank_line = None, region.rest, True
        elif region.failed is not None:
            self._region = None
            # Something is passed on, so that looking again comes to an end.
            given_up, again = (
                (region.failed[:1], region.failed[1:])
                if region.calls or not self._opening
                else (self._opening, region.failed)
            )
            self._write(given_up, events)
            self._text = again

    def _write(self, text: str, events: list[ToolEvent]) -> None:
        if not text:
            return
        _, newline, tail = text.rpartition("\n")
        self._blank_line = not tail.strip() and (bool(newline) or self._blank_line)
        if not self._words:
            self._space += text
            if not self._space.strip():
                return
            text, self._space, self._words = self._space, "", True
        events.append(Text(text))


def first_of(markers: Sequence[str], text: str) -> tuple[int, int] | None:
    """Where the first of these markers is."""
    found = [(text.find(marker), len(marker)) for marker in markers]
    places = [(start, start + size) for start, size in found if start >= 0]
    return min(places, default=None)


def indent(text: str, at_line: bool) -> int:
    """How many of the text's last characters are the space at the beginning of a line, which
    belongs to a bracket that may follow. at_line: whether the text is at the start of a line."""
    kept = text.rstrip(" \t")
    begins = kept.endswith("\n") if kept else at_line
    return len(text) - len(kept) if begins else 0


def partial(markers: Sequence[str], text: str) -> int:
    """How many of the text's last characters begin one of these markers."""
    longest = min(len(text), max(map(len, markers)) - 1)
    for size in range(longest, 0, -1):
        tail = text[-size:]
        if any(marker.startswith(tail) for marker in markers):
            return size
    return 0
