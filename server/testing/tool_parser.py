"""What every tool parser promises."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, ClassVar

from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolParser,
    ToolParserContext,
)
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "For tests.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("get_weather", "get_time")
]
ARGUMENTS = {"city": "Paris"}
PLAIN = (
    "",
    "The weather is fine.",
    "\n  Two lines,\n\nindented: 1 < 2, [a], {b} and é 👍.\n",
    "Unclosed { [ ( < \" ' \\",
)
Answer = tuple[str, list[tuple[str, str, bool]]]


class ToolParserSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `ToolParser` for the context).

    call: how the model writes a call of the tool `get_weather` with the arguments
    `{"city": "Paris"}`; bare: one of `get_time` without arguments. Promises about calls need them.
    """

    kind = "tool_parser"
    call: ClassVar[str] = ""
    bare: ClassVar[str] = ""

    def parser(self) -> ToolParser:
        """The parser under test."""
        parser = self.make(ToolParserContext("tiny"))
        assert isinstance(parser, ToolParser), f"make returned {type(parser).__name__}"
        return parser

    def read(self, pieces: Sequence[str], truncated: bool = False) -> Answer:
        """Text and calls (name, arguments, whether whole) of an answer."""
        stream = self.parser().begin(TOOLS)
        events = [event for piece in pieces for event in stream.feed(piece)]
        text, calls = "", list[tuple[str, str, bool]]()
        for event in [*events, *stream.finish(truncated)]:
            match event:
                case Text():
                    text += event.text
                case CallBegin():
                    calls.append((event.name, "", False))
                case CallArguments() | CallEnd():
                    assert calls, f"{type(event).__name__} came before CallBegin"
                    name, arguments, whole = calls[-1]
                    assert not whole, f"{type(event).__name__} came after CallEnd"
                    more = event.text if isinstance(event, CallArguments) else ""
                    calls[-1] = (name, arguments + more, isinstance(event, CallEnd))
                case _:
                    raise AssertionError(f"{event!r} is no event of this contract")
        return text, calls

    def samples(self) -> list[str]:
        """Texts with and without calls, whole and spoilt."""
        answers = ["Well.\n" + self.call, self.call + self.bare + " Done.", self.bare]
        texts = [*PLAIN, *answers]
        source = random.Random(7)
        for _ in range(60):
            text = list(source.choice(answers))
            for _ in range(source.randrange(4)):
                place = source.randrange(len(text) + 1)
                text[place : place + source.randrange(3)] = source.choice(["{", "}", '"', "", "x"])
            texts.append("".join(text))
        return texts

    def test_text_without_calls_comes_back(self) -> None:
        """An answer without calls is text, character for character."""
        for text in PLAIN:
            assert self.read([text]) == (text, []), f"{text!r} became {self.read([text])!r}"

    def test_cutting_changes_nothing(self) -> None:
        """However an answer is cut into pieces, it is read alike."""
        source = random.Random(3)
        for text in self.samples():
            for truncated in (False, True):
                whole = self.read([text], truncated)
                place = source.randrange(len(text) + 1)
                for pieces in (list(text), [text[:place], text[place:]]):
                    found = self.read(pieces, truncated)
                    assert found == whole, f"{pieces!r} gives {found!r}, in one piece {whole!r}"

    def test_calls_are_found(self) -> None:
        """The calls of an answer are found, text around them is kept, no arguments are `{}`."""
        self._needs_calls()
        text, calls = self.read(["Well.\n" + self.call])
        assert text.strip() == "Well.", f"the text in front became {text!r}"
        assert [(name, whole) for name, _, whole in calls] == [("get_weather", True)]
        assert json.loads(calls[0][1]) == ARGUMENTS, f"its arguments are {calls[0][1]!r}"
        found = self.read([self.bare])
        assert found == ("", [("get_time", "{}", True)]), f"without arguments it is {found!r}"

    def test_arguments_of_whole_calls_are_objects(self) -> None:
        """Whatever the answer, the arguments of a whole call are a JSON object; what is no call
        stays text."""
        for sample in self.samples():
            text, calls = self.read([sample])
            for name, arguments, whole in calls:
                assert name, f"{sample!r} gives a call without a name"
                if whole:
                    assert isinstance(json.loads(arguments), dict), f"{arguments!r} is no object"
            if not calls:
                assert text == sample, f"{sample!r} has no call and became {text!r}"

    def test_a_call_that_was_cut_off_has_what_came(self) -> None:
        """A call that the limit of tokens cuts off is given as far as it came, and not as whole."""
        self._needs_calls()
        _, [(_, full, _)] = self.read([self.call])
        for size in range(1, len(self.call)):
            _, calls = self.read([self.call[:size]], truncated=True)
            for name, arguments, whole in calls:
                assert name == "get_weather", f"a call of {name!r} came of {self.call[:size]!r}"
                if not whole:
                    assert full.startswith(arguments), f"{arguments!r} does not begin {full!r}"

    def test_streams_share_nothing(self) -> None:
        """An answer that was left in the middle of a call does not reach another one."""
        self._needs_calls()
        parser = self.parser()
        parser.begin(TOOLS).feed(self.call[: len(self.call) // 2])
        stream = parser.begin(TOOLS)
        events = [*stream.feed("plain"), *stream.finish(False)]
        text = "".join(event.text for event in events if isinstance(event, Text))
        assert text == "plain", f"another answer became {events!r}"

    def test_ids_differ(self) -> None:
        """Ids of calls are texts that do not repeat."""
        ids = [self.parser().call_id() for _ in range(100)]
        assert all(isinstance(each, str) and each for each in ids), f"an id is {ids[0]!r}"
        assert len(set(ids)) == len(ids), "an id came twice"

    def _needs_calls(self) -> None:
        if not self.call or not self.bare:
            raise NotApplicable("the suite was given no `call` and `bare`")
