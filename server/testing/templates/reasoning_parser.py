"""Reasoning parser `example`: what comes before `[answer]` is reasoning."""

from __future__ import annotations

from pydantic import Field

from octavo.core.contracts import Options
from octavo.server.contracts.reasoning_parser import (
    ReasoningParser,
    ReasoningParserContext,
    ReasoningStream,
    Split,
)


class ExampleOptions(Options):
    """Where reasoning ends."""

    mark: str = Field(default="[answer]", min_length=1, description="What the answer begins with.")


class ExampleParser(ReasoningParser):
    """An answer without the mark is all reasoning."""

    def __init__(self, options: ExampleOptions, context: ReasoningParserContext) -> None:
        self._mark = options.mark

    def begin(self, prompt: str, continued: str) -> ReasoningStream:
        return ExampleStream(self._mark, answering=self._mark in continued)


class ExampleStream(ReasoningStream):
    """Holds back what may be the beginning of the mark."""

    def __init__(self, mark: str, *, answering: bool) -> None:
        self._mark, self._answering = mark, answering
        self._text = ""

    def feed(self, text: str) -> Split:
        if self._answering:
            return Split(content=text)
        self._text += text
        before, mark, after = self._text.partition(self._mark)
        if mark:
            self._text, self._answering = "", True
            return Split(before, after)
        sizes = range(min(len(self._mark), len(before)), 0, -1)
        held = next((size for size in sizes if self._mark.startswith(before[-size:])), 0)
        self._text = before[len(before) - held :]
        return Split(before[: len(before) - held])

    def finish(self) -> Split:
        rest, self._text = self._text, ""
        return Split(rest)
