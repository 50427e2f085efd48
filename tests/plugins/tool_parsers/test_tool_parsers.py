"""Tool parsers: every form of calls, what is no call, and that cutting the text changes nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.contracts import NoOptions
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.detokenizer import TextStream, TokenTable
from octavo.server.contracts.tool_parser import (
    CallArguments,
    CallBegin,
    CallEnd,
    Text,
    ToolEvent,
    ToolParser,
    ToolParserContext,
)
from octavo.server.tool_parsers.hermes import HermesParser
from octavo.server.tool_parsers.llama3_json import Llama3JsonParser
from octavo.server.tool_parsers.mistral import MistralParser
from octavo.server.tool_parsers.options import JsonParserOptions
from octavo.server.tool_parsers.pythonic import PythonicParser
from octavo.testing.byte_tokenizer import ByteTokenizer

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g", "get_weather")]
CONTEXT = ToolParserContext("model")
Whole = tuple[str, list[tuple[str, str, bool]]]


def parser(name: str, eager: bool = False) -> ToolParser:
    if name == "pythonic":
        return PythonicParser(NoOptions(), CONTEXT)
    cls: Any = {"hermes": HermesParser, "mistral": MistralParser, "llama": Llama3JsonParser}[name]
    made: ToolParser = cls(JsonParserOptions(stream_arguments=eager), CONTEXT)
    return made


def joined(events: list[ToolEvent]) -> Whole:
    """Text, and calls as (name, arguments, whether it is whole)."""
    text, calls = "", list[tuple[str, str, bool]]()
    for event in events:
        match event:
            case Text():
                text += event.text
            case CallBegin():
                calls.append((event.name, "", False))
            case CallArguments():
                name, arguments, _ = calls[-1]
                calls[-1] = (name, arguments + event.text, False)
            case CallEnd():
                calls[-1] = (*calls[-1][:2], True)
    return text, calls


def parse(made: ToolParser, pieces: list[str], truncated: bool = False) -> Whole:
    stream = made.begin(TOOLS)
    events = [event for piece in pieces for event in stream.feed(piece)]
    return joined(events + stream.finish(truncated))


def pieces(text: str, source: random.Random) -> list[str]:
    found = []
    while text:
        size = source.choice((1, 1, 2, 3, 5, 8, 40))
        found.append(text[:size])
        text = text[size:]
    return found


F = ("f", '{"a": 1}', True)
G = ("g", "{}", True)

FORMS: list[tuple[str, str, Whole]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', ("", [F])),
    ("hermes", '<tool_call>{"name": "g"}</tool_call>', ("", [G])),
    ("hermes", '<tool_call>{"arguments": null, "name": "g"}</tool_call>', ("", [G])),
    ("hermes", '<tool_call>{"name": "g", "arguments": ""}</tool_call>', ("", [G])),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', ("", [F])),
    (
        "hermes",
        'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call> Done.',
        ("Let me see.\n Done.", [F, G]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "g"}\n{"name": "f", "arguments": {"a": 1}}</tool_call>',
        ("", [G, F]),
    ),
    (
        "hermes",
        '<tool_call>[{"name": "g"}, {"name": "f", "arguments": {"a": 1}}]</tool_call>',
        ("", [G, F]),
    ),
    # The last bracket is missing, or there is one too many: often so with small models.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>', ("", [F])),
    ("hermes", '<tool_call>{"name": "g"}} no end', ("} no end", [G])),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', ("", [F])),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>{}\\"é\\u00e9\\n"}}</tool_call>',
        ("", [("f", '{"x": "</tool_call>{}\\"é\\u00e9\\n"}', True)]),
    ),
    # Line breaks in a string, which JSON forbids and models write.
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"code": "a\nb\tc"}}</tool_call>',
        ("", [("f", '{"code": "a\\nb\\tc"}', True)]),
    ),
    ("llama", '{"name": "f", "parameters": {"a": 1}}', ("", [F])),
    ("llama", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', ("", [F])),
    (
        "llama",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", [F, G]),
    ),
    ("llama", '[{"name": "g"}, {"name": "f", "arguments": {"a": 1}}]', ("", [G, F])),
    ("llama", 'Sure:\n{"name": "g"}\nThere.', ("Sure:\n\nThere.", [G])),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]', ("", [F, G])),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', ("", [F, G])),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', ("", [F])),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123456[ARGS]{"a": 1}', ("", [F])),
    ("mistral", 'Well. [TOOL_CALLS]f[ARGS]{"a": {"b": "}"}} Done', (
        "Well.  Done", [("f", '{"a": {"b": "}"}}', True)],
    )),
    ("pythonic", "[f(a=1)]", ("", [F])),
    ("pythonic", "[f(a=1), g()]", ("", [F, G])),
    ("pythonic", "<|python_start|>[f(a=1)]<|python_end|> ok", (" ok", [F])),
    ("pythonic", "Sure.\n[ g ( ) ]", ("Sure.\n", [G])),
    (
        "pythonic",
        "[f(s=\"it's ])\\\"\", t='x\\'y', l=[1, -2.5, (True, None)], d={'k': [], 3: false})]",
        (
            "",
            [
                (
                    "f",
                    '{"s": "it\'s ])\\"", "t": "x\'y", "l": [1, -2.5, [true, null]], '
                    '"d": {"k": [], "3": false}}',
                    True,
                )
            ],
        ),
    ),
]  # fmt: skip

NO_CALLS: list[tuple[str, str]] = [
    ("hermes", "Just text, 1 < 2 and <tool> too.\n"),
    ("hermes", "\n\n  indented"),
    ("hermes", " \n"),
    ("hermes", "ends with <tool_"),
    ("hermes", "<tool_call>no JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": nul}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 300),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("llama", '{"answer": [1, 2]}'),
    ("llama", '{"name": "unknown", "parameters": {}}'),
    ("llama", 'In a line {"name": "f", "parameters": {}}'),
    ("llama", "[1, 2, 3]"),
    ("llama", "{{{{\n{\n[\n"),
    ("mistral", "[TOOL_CALLS]what now"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": }'),
    ("pythonic", "[a link](http://x)"),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(a=open('x'))]"),
    ("pythonic", "[h(a=1)]"),
    ("pythonic", "[f(a=1e999)]"),
    ("pythonic", "[f(a=1"),
    ("pythonic", "[f(a=" + "(" * 500),
    ("pythonic", "[f(a=1, a=2)]"),
    ("pythonic", "[1, 2]"),
]

PARTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "x}"}}'],
    "llama": ["<|python_tag|>", '{"name": "g", "parameters": {"b": [1.5e3]}}', "; ", ", "],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "f", '{"a": {"b": []}}', '[{"name": "g"}]'],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[f(a='x]')]", "g()", ", ", "b=-1"],
}
COMMON = [
    "\n",
    " ",
    "a",
    "é👍",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    ",",
    ":",
    "(",
    ")",
    "'",
    '{"name": "f"',
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("name", "text", "whole"), FORMS)
def test_forms(name: str, text: str, whole: Whole, eager: bool) -> None:
    made = parser(name, eager)
    assert parse(made, [text]) == whole
    assert parse(made, list(text)) == whole
    assert parse(made, [text], truncated=True)[1] == whole[1]
    for _, arguments, _ in whole[1]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_is_no_call_comes_back_as_text(name: str, text: str) -> None:
    made = parser(name)
    assert parse(made, [text]) == (text, [])
    assert parse(made, list(text)) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 12', ("f", '{"a": 12', False)),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\u00', (
            "f", '{"a": "x\\u00', False,
        )),
        ("hermes", '<tool_call>{"name": "f", "argu', ("f", "", False)),
        ("llama", '{"name": "f", "parameters": {"a": [tr', ("f", '{"a": [tr', False)),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a"', ("f", '{"a"', False)),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a"', ("f", '{"a"', False)),
        ("pythonic", "[f(a=1, b='x", ("f", '{"a": 1', False)),
        ("pythonic", "[f(", ("f", "{", False)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("eager", [False, True])
def test_a_call_that_was_cut_off_is_given_as_far_as_it_came(
    name: str, text: str, call: tuple[str, str, bool], eager: bool
) -> None:
    made = parser(name, eager)
    assert parse(made, [text], truncated=True) == ("", [call])
    assert parse(made, list(text), truncated=True) == ("", [call])


@pytest.mark.parametrize(
    ("text", "rest"), [('[g(){"name": "f"', '{"name": "f"'), ("[g(), [1, 2", " [1, 2")]
)
def test_what_was_cut_off_and_is_no_call_is_text(text: str, rest: str) -> None:
    assert parse(parser("pythonic"), [text], truncated=True) == (rest, [G])
    assert parse(parser("pythonic"), list(text), truncated=True) == (rest, [G])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama", 'See:\n \t{"name": "f", "parameters": {"a": 1}}'),
        ("pythonic", "See:\n \t[f(a=1)]"),
    ],
)
def test_the_space_before_a_call_is_no_text_however_it_comes(name: str, text: str) -> None:
    assert parse(parser(name), [text]) == ("See:\n", [F])
    assert parse(parser(name), list(text)) == ("See:\n", [F])


def test_eager_arguments_come_as_they_are_written() -> None:
    stream = parser("hermes", eager=True).begin(TOOLS)
    assert stream.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert stream.feed('{"a": "x') == [CallBegin("f"), CallArguments('{"a": "x')]
    assert stream.feed("yz") == [CallArguments("yz")]
    assert stream.feed('"}') == [CallArguments('"}')]
    assert stream.feed("}") == [CallEnd()]
    assert stream.feed("</tool_call>") == []
    assert stream.finish(False) == []


def test_eager_arguments_that_are_malformed_are_given_as_written() -> None:
    made = parser("hermes", eager=True)
    text = '<tool_call>{"name": "f", "arguments": {"a": oops, "b": 1}}</tool_call>ok'
    assert parse(made, list(text)) == ("ok", [("f", '{"a": oops, "b": 1}}', True)])
    assert parse(made, [text]) == ("ok", [("f", '{"a": oops, "b": 1}}', True)])


def test_lazy_calls_are_given_whole() -> None:
    stream = parser("hermes").begin(TOOLS)
    assert stream.feed('<tool_call>{"name": "f", "arguments": {"a": 1}') == []
    assert stream.feed("}") == [CallBegin("f"), CallArguments('{"a": 1}'), CallEnd()]


def test_streams_share_nothing() -> None:
    made = parser("hermes")
    first, second = made.begin(TOOLS), made.begin(TOOLS)
    first.feed('<tool_call>{"name": "f", ')
    assert second.feed("plain") == [Text("plain")]
    assert joined(first.feed('"arguments": {"a": 1}}')) == ("", [F])


def test_ids() -> None:
    assert parser("hermes").call_id().startswith("call_")
    ids = {parser("mistral").call_id() for _ in range(50)}
    assert all(len(each) == 9 and each.isalnum() for each in ids)
    assert len(ids) == 50


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("name", PARTS)
@given(data=st.data())
def test_cutting_changes_nothing(name: str, eager: bool, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(PARTS[name] * 3 + COMMON), max_size=12))
    text = "".join(parts)
    truncated = data.draw(st.booleans())
    source = random.Random(data.draw(st.integers(0, 2**32)))
    made = parser(name, eager)
    whole = parse(made, [text], truncated)
    assert parse(made, list(text), truncated) == whole
    assert parse(made, pieces(text, source), truncated) == whole
    for called, arguments, complete in whole[1]:
        assert called
        if complete and not eager:
            assert isinstance(json.loads(arguments), dict)
    if not whole[1]:
        assert whole[0] == text, "without a call nothing is lost"


def test_long_answers_cost_no_more_than_their_length() -> None:
    """Every character is looked at a bounded number of times, also in adverse texts."""
    for name, text in (
        ("hermes", "<tool_call>" * 3000),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 100_000),
        ("llama", "{\n" * 10_000),
        ("mistral", "[TOOL_CALLS]" * 3000),
        ("pythonic", "[f(a='" + "x" * 100_000),
        ("pythonic", "[f(\n" * 2000),
    ):
        assert "".join(parse(parser(name), [text])[0]) == text


def test_special_tokens_that_parsers_need_are_shown_and_others_are_not() -> None:
    tokenizer = ByteTokenizer()
    shown = tokenizer.id_of("<|tool|>")
    ids = [*b"a", shown, tokenizer.id_of("<|im_start|>"), *b"b"]
    for asked, expected in ((None, "ab"), ([shown], "a<|tool|>b")):
        sampling = SamplingParams(shown_special_token_ids=asked)
        stream = TextStream(TokenTable(tokenizer), [1], sampling)
        text = "".join(stream.feed(token)[0] for token in ids) + stream.finish()
        assert text == expected
