"""Reasoning parsers: where reasoning ends, and that cutting the text changes nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.contracts import NoOptions
from octavo.server.contracts.reasoning_parser import ReasoningParser, ReasoningParserContext
from octavo.server.reasoning_parsers.think import DeepSeekR1Parser, Qwen3Parser

R1 = DeepSeekR1Parser(NoOptions(), ReasoningParserContext("model"))
QWEN = Qwen3Parser(NoOptions(), ReasoningParserContext("model"))
PLAIN = "<|im_start|>assistant\n"


def split(
    parser: ReasoningParser, pieces: list[str], prompt: str = PLAIN, continued: str = ""
) -> tuple[str, str]:
    stream = parser.begin(prompt, continued)
    parts = [*(stream.feed(piece) for piece in pieces), stream.finish()]
    reasoning, content = "", ""
    for part in parts:
        assert not (part.reasoning and content), "reasoning comes before the answer"
        reasoning += part.reasoning
        content += part.content
    return reasoning, content


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "expected"),
    [
        (R1, PLAIN, "<think>\nHm. \n</think>\n\nYes.\n", ("Hm.", "Yes.\n")),
        (R1, PLAIN, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (R1, PLAIN, "Hm.", ("Hm.", "")),
        (R1, PLAIN + "<think>\n", "Hm.</think>Yes.", ("Hm.", "Yes.")),
        (R1, PLAIN + "<think>\n\n</think>\n\n", "Yes.", ("", "Yes.")),
        (R1, PLAIN, "<thi", ("<thi", "")),
        (R1, PLAIN, "a </thin b</think>c", ("a </thin b", "c")),
        (QWEN, PLAIN, "<think>\nHm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (QWEN, PLAIN, "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        (QWEN, PLAIN, "Yes.", ("", "Yes.")),
        (QWEN, PLAIN, "  Yes <think>", ("", "  Yes <think>")),
        (QWEN, PLAIN, "<think>Hm", ("Hm", "")),
        (QWEN, PLAIN, "<thin", ("", "<thin")),
        (QWEN, PLAIN + "<think>\n", "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (QWEN, PLAIN + "<think>\n\n</think>\n\n", "Yes </think>", ("", "Yes </think>")),
    ],
)
def test_splits(parser: ReasoningParser, prompt: str, text: str, expected: tuple[str, str]) -> None:
    assert split(parser, [text], prompt) == expected
    assert split(parser, list(text), prompt) == expected


def test_an_answer_that_is_continued() -> None:
    assert split(QWEN, ["more</think>Yes"], "...<think>so", "<think>so") == ("more", "Yes")
    assert split(R1, ["more"], "...<think>so</think>Y", "<think>so</think>Y") == ("", "more")


PARTS = ["<think>", "</think>", "<th", "</", "a", " ", "\n", "é"]


@given(
    st.lists(st.sampled_from(PARTS), max_size=10),
    st.integers(0, 2**32),
    st.sampled_from([R1, QWEN]),
)
def test_cutting_changes_nothing(parts: list[str], seed: int, parser: ReasoningParser) -> None:
    text, source = "".join(parts), random.Random(seed)
    whole = split(parser, [text])
    cut, rest = [], text
    while rest:
        size = source.randint(1, 4)
        cut.append(rest[:size])
        rest = rest[size:]
    assert split(parser, cut) == whole == split(parser, list(text))
