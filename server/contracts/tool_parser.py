"""Kind `tool_parser`: finds the tool calls in what a model writes, in that model's own format.

Runs in the API process, on its event loop: be quick. One parser serves all requests and keeps
nothing; `begin` makes a stream for one choice of one answer, so that no state reaches another. An
answer that is not streamed goes through the same stream in one piece, and how the text is cut must
make no difference: the joined deltas are the answer.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True, slots=True)
class Text:
    """What the answer says beside its calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of this tool begins; the one before has ended."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the arguments of the call that has begun. Joined they are an object,
    `{}` for a call without any; only of a call that was cut off they are a part of one."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is whole."""


ToolEvent = Text | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class ToolParserContext:
    """model: `model.source`, for parsers that differ by model."""

    model: str


class ToolStream(ABC):
    """The text of one choice, as it comes."""

    @abstractmethod
    def feed(self, text: str) -> list[ToolEvent]:
        """What more of the text adds. Text that may still become a call is held back."""

    @abstractmethod
    def finish(self, truncated: bool) -> list[ToolEvent]:
        """The rest. truncated: the limit of tokens ended the answer, so that a call in progress is
        given as far as it came, without `CallEnd`. Otherwise what is no call is text."""


class ToolParser(ABC):
    """special_tokens: texts of special tokens that mark calls. They stay in the text that streams
    are fed, whatever the request says of special tokens."""

    special_tokens: tuple[str, ...] = ()

    @abstractmethod
    def begin(self, tools: Sequence[Mapping[str, Any]]) -> ToolStream:
        """A stream for one choice. tools: those that were offered, in OpenAI's form."""

    def call_id(self) -> str:
        """An id for a call, unique in its conversation; override where the model's template asks
        for a form."""
        return new_call_id()


def new_call_id() -> str:
    """An id as OpenAI's look."""
    return f"call_{secrets.token_hex(12)}"


class Spec:
    @hookspec
    def octavo_tool_parsers(self) -> list[Provider[ToolParser]]:  # type: ignore[empty-body]
        """Providers of tool parsers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `ToolParserContext`.
        """


KIND = Kind("tool_parser", Spec, ToolParser, ToolParserContext, "server.tool_parser")
