"""Reasoning parsers `deepseek_r1` and `qwen3`: reasoning between `<think>` and `</think>`.

They differ in what an answer is that has no opening tag, where the prompt does not tell either:
reasoning for `deepseek_r1`, whose template writes the tag, and no reasoning for `qwen3`.
"""

from __future__ import annotations

from octavo.core.contracts import NoOptions
from octavo.server.contracts.reasoning_parser import (
    ReasoningParser,
    ReasoningParserContext,
    ReasoningStream,
    Split,
)

START, END = "<think>", "</think>"


class ThinkStream(ReasoningStream):
    """Space around the reasoning and in front of the answer that follows it is left out.

    inside: whether the text begins in the reasoning. opens: whether an opening tag may still come.
    """

    def __init__(self, inside: bool, opens: bool) -> None:
        self._inside, self._opens = inside, opens
        self._text = ""  # held back
        self._fresh = inside  # whether space at this place is left out

    def feed(self, text: str) -> Split:
        self._text += text
        if not self._open():
            return Split()
        if not self._inside:
            return Split(content=self._answer())
        end = self._text.find(END)
        if end < 0:
            return Split(self._reasoning())
        reasoning = self._text[:end]
        reasoning = (reasoning.lstrip() if self._fresh else reasoning).rstrip()
        self._text = self._text[end + len(END) :]
        self._inside, self._fresh = False, True
        return Split(reasoning, self._answer())

    def finish(self) -> Split:
        text, self._text = self._text, ""
        if self._inside:
            return Split((text.lstrip() if self._fresh else text).rstrip())
        return Split(content=text.lstrip() if self._fresh else text)

    def _open(self) -> bool:
        """Take an opening tag from the front. False while one may still come."""
        word = self._text.lstrip()
        if self._opens and word.startswith(START):
            self._text, self._inside, self._fresh = word[len(START) :], True, True
        elif self._opens and START.startswith(word):
            return False
        self._opens = False
        return True

    def _reasoning(self) -> str:
        """What is surely reasoning: not a part of the end tag, nor space that may come before."""
        text = self._text.lstrip() if self._fresh else self._text
        keep = next((n for n in range(len(END) - 1, 0, -1) if text.endswith(END[:n])), 0)
        sure = text[: len(text) - keep].rstrip()
        self._text = text[len(sure) :]
        self._fresh = self._fresh and not sure
        return sure

    def _answer(self) -> str:
        text, self._text = self._text, ""
        if self._fresh:
            text = text.lstrip()
            self._fresh = not text
        return text


class DeepSeekR1Parser(ReasoningParser):
    """Every answer begins with reasoning, unless the prompt has closed it already."""

    special_tokens = (START, END)
    begins_inside = True

    def __init__(self, options: NoOptions, context: ReasoningParserContext) -> None:
        pass

    def begin(self, prompt: str, continued: str) -> ReasoningStream:
        given = prompt.rstrip()
        if continued:
            inside, opens = continued.rfind(START) > continued.rfind(END), False
        elif given.endswith(START):
            inside, opens = True, False
        elif given.endswith(END):
            inside, opens = False, False
        else:
            inside, opens = self.begins_inside, True
        return ThinkStream(inside, opens)


class Qwen3Parser(DeepSeekR1Parser):
    """An answer that does not begin with the tag has no reasoning."""

    begins_inside = False
