"""What every reasoning parser promises."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar

from octavo.server.contracts.reasoning_parser import ReasoningParser, ReasoningParserContext
from octavo.testing.conformance.base import ConformanceSuite, NotApplicable

PLAIN = ("", "The answer.", "\n Two lines,\nwith < and é 👍.\n", "<", "</")
PROMPT = "user: Hello\nassistant: "


class ReasoningParserSuite(ConformanceSuite):
    """Subclass it with `provider`, or override `make` (a `ReasoningParser` for the context).

    answer: how the model writes the reasoning `Hm.` and then the answer `Yes.`; promises about
    reasoning need it.
    """

    kind = "reasoning_parser"
    answer: ClassVar[str] = ""

    def parser(self) -> ReasoningParser:
        """The parser under test."""
        parser = self.make(ReasoningParserContext("tiny"))
        assert isinstance(parser, ReasoningParser), f"make returned {type(parser).__name__}"
        return parser

    def read(self, pieces: Sequence[str]) -> tuple[str, str]:
        """Reasoning and content of an answer."""
        stream = self.parser().begin(PROMPT, "")
        reasoning, content = "", ""
        for part in [*map(stream.feed, pieces), stream.finish()]:
            assert not (content and part.reasoning), "reasoning came after content"
            reasoning += part.reasoning
            content += part.content
        return reasoning, content

    def samples(self) -> list[str]:
        """Texts with reasoning, without it, and with spoilt marks."""
        texts = [*PLAIN, self.answer, self.answer * 2]
        source = random.Random(5)
        for _ in range(60):
            text = list(source.choice([self.answer, self.answer * 2]))
            for _ in range(source.randrange(4)):
                place = source.randrange(len(text) + 1)
                text[place : place + source.randrange(3)] = source.choice(["<", ">", " ", "", "x"])
            texts.append("".join(text))
        return texts

    def test_cutting_changes_nothing(self) -> None:
        """However an answer is cut into pieces, it is read alike, the reasoning first."""
        source = random.Random(3)
        for text in self.samples():
            whole = self.read([text])
            place = source.randrange(len(text) + 1)
            for pieces in (list(text), [text[:place], text[place:]]):
                found = self.read(pieces)
                assert found == whole, f"{pieces!r} gives {found!r}, in one piece {whole!r}"

    def test_nothing_is_made_up_or_lost(self) -> None:
        """Reasoning and content are pieces of the answer; of one without marks all of it, but for
        space around."""
        for text in self.samples():
            for piece in self.read([text]):
                assert piece in text, f"{piece!r} was made up: it is not in the answer {text!r}"
        for text in PLAIN:
            reasoning, content = self.read([text])
            found = (reasoning + content).strip()
            assert found == text.strip(), f"{text!r} became {(reasoning, content)!r}"

    def test_reasoning_is_told_apart(self) -> None:
        """Reasoning comes without its marks, and the content is the answer."""
        self._needs_answer()
        reasoning, content = self.read([self.answer])
        assert reasoning.strip() == "Hm.", f"the reasoning is {reasoning!r}"
        assert content.strip() == "Yes.", f"the content is {content!r}"

    def test_streams_share_nothing(self) -> None:
        """An answer that was left in the middle of its reasoning does not reach another one."""
        self._needs_answer()
        parser = self.parser()
        parser.begin(PROMPT, "").feed(self.answer[: len(self.answer) // 2])
        stream = parser.begin(PROMPT, "")
        parts = [stream.feed(self.answer), stream.finish()]
        reasoning = "".join(part.reasoning for part in parts).strip()
        content = "".join(part.content for part in parts).strip()
        assert (reasoning, content) == ("Hm.", "Yes."), (
            f"another answer became {reasoning!r} and {content!r}"
        )

    def _needs_answer(self) -> None:
        if not self.answer:
            raise NotApplicable("the suite was given no `answer`")
