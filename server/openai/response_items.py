"""The output of `/v1/responses`: items that grow, and an event for each change."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from octavo.server.contracts.tool_parser import Text
from octavo.server.openai.answer import Arguments, Begin, End, Event, Reasoning
from octavo.server.openai.protocol.chat import TokenLogprob
from octavo.server.openai.protocol.responses import (
    FunctionCallItem,
    Item,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

ItemEvent = tuple[str, dict[str, Any]]
"""An event's type and what it holds."""


class Items:
    """The items so far. Every method yields the events of what it changes."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._open: Item | None = None
        self._text: list[str] = []  # of the open item
        self._logprobs: list[TokenLogprob] = []  # that belong to the next text

    @property
    def reasoning(self) -> str:
        """The text of all reasoning."""
        items = (item for item in self.items if isinstance(item, ReasoningItem))
        return "".join(part.text for item in items for part in item.content)

    def add(
        self, events: Iterable[Event], logprobs: Sequence[TokenLogprob] = ()
    ) -> Iterator[ItemEvent]:
        """logprobs: of the tokens that the text came with."""
        self._logprobs += logprobs
        for event in events:
            match event:
                case Reasoning():
                    yield from self._grow(ReasoningItem, event.text)
                case Text():
                    yield from self._grow(OutputMessage, event.text)
                case Begin():
                    yield from self.close("completed")
                    call = FunctionCallItem(
                        id=_id("fc"),
                        type="function_call",
                        call_id=event.id,
                        name=event.name,
                        arguments="",
                        status="in_progress",
                    )
                    yield self._begin(call)
                case Arguments():
                    self._text.append(event.text)
                    yield self._event("response.function_call_arguments.delta", delta=event.text)
                case End():
                    yield from self.close("completed")

    def finish(self, status: str) -> Iterator[ItemEvent]:
        """The answer is complete. An empty answer has an empty message."""
        if not self.items:
            yield from self._grow(OutputMessage, "")
        yield from self.close(status)

    def close(self, status: str) -> Iterator[ItemEvent]:
        """End the open item."""
        item, text = self._open, "".join(self._text)
        if item is None:
            return
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            yield self._event(
                "response.function_call_arguments.done", name=item.name, arguments=text
            )
        else:
            part = item.content[0]
            part.text = text
            if isinstance(part, OutputText):
                part.logprobs += self._logprobs
                self._logprobs = []
                yield self._event("response.output_text.done", 0, text=text, logprobs=part.logprobs)
            else:
                yield self._event("response.reasoning_text.done", 0, text=text)
            yield self._event("response.content_part.done", 0, part=part.model_copy())
        yield "response.output_item.done", {"output_index": self._index, "item": item}
        self._open, self._text = None, []

    @property
    def _index(self) -> int:
        return len(self.items) - 1

    def _grow(self, kind: type[OutputMessage | ReasoningItem], text: str) -> Iterator[ItemEvent]:
        if not isinstance(self._open, kind):
            yield from self.close("completed")
            yield from self._begin_text(kind)
        self._text.append(text)
        if kind is ReasoningItem:
            yield self._event("response.reasoning_text.delta", 0, delta=text)
        elif text:
            assert isinstance(self._open, OutputMessage), "text belongs to messages"
            new, self._logprobs = self._logprobs, []
            self._open.content[0].logprobs += new
            yield self._event("response.output_text.delta", 0, delta=text, logprobs=new)

    def _begin_text(self, kind: type[OutputMessage | ReasoningItem]) -> Iterator[ItemEvent]:
        item: OutputMessage | ReasoningItem
        part: OutputText | ReasoningText
        if kind is ReasoningItem:
            item = ReasoningItem(
                id=_id("rs"), type="reasoning", summary=[], content=[], status="in_progress"
            )
            part = ReasoningText(type="reasoning_text", text="")
            yield self._begin(item)
            item.content = [part]
        else:
            item = OutputMessage(
                id=_id("msg"), type="message", role="assistant", status="in_progress", content=[]
            )
            part = OutputText(type="output_text", text="", annotations=[], logprobs=[])
            yield self._begin(item)
            item.content = [part]
        yield self._event("response.content_part.added", 0, part=part.model_copy(deep=True))

    def _begin(self, item: Item) -> ItemEvent:
        self.items.append(item)
        self._open, self._text = item, []
        added = item.model_copy()
        return "response.output_item.added", {"output_index": self._index, "item": added}

    def _event(self, kind: str, content_index: int | None = None, **what: Any) -> ItemEvent:
        assert self._open is not None, "an item is open"
        place: dict[str, Any] = {"item_id": self._open.id, "output_index": self._index}
        if content_index is not None:
            place["content_index"] = content_index
        return kind, place | what


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
