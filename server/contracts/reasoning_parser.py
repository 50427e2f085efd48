"""Kind `reasoning_parser`: tells a model's reasoning from its answer.

Runs in the API process, on its event loop: be quick. As with tool parsers, one parser serves all
requests and keeps nothing, `begin` makes a stream for one choice, and how the text is cut makes no
difference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True, slots=True)
class Split:
    """What more of the text adds to the reasoning and to the answer; the reasoning comes first."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True)
class ReasoningParserContext:
    """model: `model.source`, for parsers that differ by model."""

    model: str


class ReasoningStream(ABC):
    """The text of one choice, as it comes."""

    @abstractmethod
    def feed(self, text: str) -> Split:
        """What more of the text adds. Text that may still become a mark is held back."""

    @abstractmethod
    def finish(self) -> Split:
        """The rest."""


class ReasoningParser(ABC):
    """special_tokens: texts of special tokens that mark reasoning. They stay in the text that
    streams are fed, whatever the request says of special tokens."""

    special_tokens: tuple[str, ...] = ()

    @abstractmethod
    def begin(self, prompt: str, continued: str) -> ReasoningStream:
        """A stream for one choice. prompt: as rendered; templates may open the reasoning in it, or
        close it at once. continued: the text of the final message where the answer continues it
        (`continue_final_message`), else empty."""


class Spec:
    @hookspec
    def octavo_reasoning_parsers(self) -> list[Provider[ReasoningParser]]:  # type: ignore[empty-body]
        """Providers of reasoning parsers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ReasoningParserContext`.
        """


KIND = Kind(
    "reasoning_parser", Spec, ReasoningParser, ReasoningParserContext, "server.reasoning_parser"
)
