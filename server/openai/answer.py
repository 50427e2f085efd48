"""From the text of an answer to reasoning, content and tool calls.

`AnswerParsers` are those that the configuration chose, `AnswerFormat` says what the answers to one
request are read with, and `AnswerReader` reads one choice, in pieces or whole, through the same
streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo.core.config.models import AUTO
from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.sampling_params import SamplingParams
from octavo.server.config import ServiceConfig
from octavo.server.contracts.reasoning_parser import (
    ReasoningParser,
    ReasoningParserContext,
    ReasoningStream,
    Split,
)
from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolParser,
    ToolParserContext,
    ToolStream,
    new_call_id,
)
from octavo.server.http.errors import ApiError
from octavo.server.openai.forced_calls import NamedCall, RequiredCalls, forced_grammar
from octavo.server.openai.protocol.tools import NO_CHOICE, Tool, ToolChoice

if TYPE_CHECKING:
    from octavo.core.registry import Registry


class AnswerParsers(NamedTuple):
    """The parsers that answers go through, where the configuration chose one."""

    tool: ToolParser | None = None
    reasoning: ReasoningParser | None = None


def make_parsers(config: ServiceConfig, registry: Registry) -> AnswerParsers:
    """The parsers that the configuration chooses, or that the user handed over."""

    def make(kind: str, context: Any) -> Any:
        choice = getattr(config.server, kind)
        if choice is None and not registry.preferred(kind):
            return None
        selection = registry.select(kind, choice or AUTO, explicit=choice is not None)
        return registry.create(selection, context)

    source = config.model.source
    return AnswerParsers(
        make("tool_parser", ToolParserContext(source)),
        make("reasoning_parser", ReasoningParserContext(source)),
    )


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of its arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class End:
    """The call is complete."""

    index: int


Event = Reasoning | Text | Begin | Arguments | End


@dataclass
class Call:
    """A complete call."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """A complete answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Reasoning():
                    self.reasoning += event.text
                case Text():
                    self.content += event.text
                case Begin():
                    self.calls.append(Call(event.id, event.name))
                case Arguments():
                    self.calls[event.index].arguments += event.text


@dataclass(frozen=True)
class AnswerFormat:
    """What the answers to one request look like, and so what they are read with."""

    parsers: AnswerParsers
    tools: Sequence[Tool] = ()
    """Those that may be called."""
    choice: ToolChoice = NO_CHOICE
    parallel: bool = True
    """Whether an answer may have more than one call."""
    structured: bool = False
    """Whether the answer follows a grammar, so that it has no reasoning in front."""

    @property
    def _tool_parser(self) -> ToolParser | None:
        return self.parsers.tool if self.choice.mode == "auto" else None

    def adjusted(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """The parameters with what reading the answers needs. Raises `ApiError`."""
        changes: dict[str, Any] = {}
        shown = self._shown_tokens(tokenizer) if params.skip_special_tokens else []
        if shown:
            changes["shown_special_token_ids"] = shown
        if self.choice.forced:
            if params.structured_outputs is not None:
                raise ApiError(
                    "a tool_choice that forces a call cannot be combined with structured output",
                    param="tool_choice",
                    code="invalid_value",
                )
            changes["structured_outputs"] = forced_grammar(
                self.tools, self.choice, parallel=self.parallel
            )
        return msgspec.structs.replace(params, **changes) if changes else params

    @property
    def reads_something(self) -> bool:
        """Whether reasoning or tool calls are parsed from the text."""
        return self.reads_reasoning or self.choice.forced or self._tool_parser is not None

    @property
    def reads_reasoning(self) -> bool:
        """Whether reasoning is parsed from the text."""
        free = not self.structured and not self.choice.forced
        return self.parsers.reasoning is not None and free

    def _shown_tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Special tokens that must stay in the text, because parsers look for them."""
        wanted: set[bytes] = set()
        for parser in (self._tool_parser, self.parsers.reasoning if self.reads_reasoning else None):
            wanted |= {text.encode() for text in (parser.special_tokens if parser else ())}
        if not wanted:
            return []
        return [i for i in sorted(tokenizer.special_ids) if tokenizer.token_bytes(i) in wanted]

    def reader(self, prompt: str, continued: str) -> AnswerReader:
        """For one choice. continued: the text of a final message that the answer continues."""
        reasoning = self.parsers.reasoning if self.reads_reasoning else None
        new_id = self.parsers.tool.call_id if self.parsers.tool is not None else new_call_id
        return AnswerReader(
            reasoning.begin(prompt, continued) if reasoning is not None else None,
            self._calls(),
            new_id,
            most_calls=None if self.parallel else 1,
        )

    def _calls(self) -> ToolStream | None:
        if self.choice.mode == "required":
            return RequiredCalls()
        if self.choice.name is not None:
            return NamedCall(self.choice.name)
        parser = self._tool_parser
        return None if parser is None else parser.begin(self.template_tools)

    @property
    def template_tools(self) -> list[Mapping[str, Any]]:
        """The tools in OpenAI's form."""
        return [tool.for_template() for tool in self.tools]


class AnswerReader:
    """Reads one choice. most_calls: calls after that many are dropped."""

    def __init__(
        self,
        reasoning: ReasoningStream | None,
        tools: ToolStream | None,
        new_id: Callable[[], str],
        *,
        most_calls: int | None = None,
    ) -> None:
        self._reasoning, self._tools, self._new_id = reasoning, tools, new_id
        self._most = most_calls
        self.calls = 0
        """Calls begun so far."""

    def feed(self, text: str, finish_reason: str | None) -> list[Event]:
        """The events of more text; with a finish_reason, the text is complete."""
        split = Split(content=text)
        if self._reasoning is not None:
            split = self._reasoning.feed(text)
            if finish_reason is not None:
                rest = self._reasoning.finish()
                split = Split(split.reasoning + rest.reasoning, split.content + rest.content)
        events: list[Event] = [Reasoning(split.reasoning)] if split.reasoning else []
        if self._tools is None:
            return [*events, Text(split.content)] if split.content else events
        found = self._tools.feed(split.content) if split.content else []
        if finish_reason is not None:
            found = [*found, *self._tools.finish(finish_reason == "length")]
        return events + [named for event in found if (named := self._named(event)) is not None]

    def finish_reason(self, given: str | None) -> str | None:
        """OpenAI's finish_reason for the engine's."""
        return "tool_calls" if given == "stop" and self.calls else given

    def _named(self, event: ToolEvent) -> Event | None:
        """An event with the call's number and id; None when the call is dropped."""
        if isinstance(event, Text):
            return event
        if isinstance(event, CallBegin):
            self.calls += 1
        if self._most is not None and self.calls > self._most:
            return None
        index = self.calls - 1
        match event:
            case CallBegin():
                return Begin(index, self._new_id(), event.name)
            case CallArguments():
                return Arguments(index, event.text)
            case CallEnd():
                return End(index)
