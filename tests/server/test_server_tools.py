"""Tool calls and reasoning in chats, over HTTP, with the real `openai` client where it matters."""

from __future__ import annotations

import asyncio
import json

import pytest

from octavo.core.contracts import NoOptions
from octavo.server.contracts.reasoning_parser import ReasoningParserContext
from octavo.server.contracts.tool_parser import ToolParserContext
from octavo.server.openai.answer import AnswerParsers
from octavo.server.reasoning_parsers.think import DeepSeekR1Parser, Qwen3Parser
from octavo.server.tool_parsers.hermes import HermesParser
from octavo.server.tool_parsers.options import JsonParserOptions

PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "get_time"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "São \\"P\\" 👍"}}\n</tool_call>'
ARGUMENTS = '{"city": "São \\"P\\" 👍"}'


def hermes(eager=False):
    return HermesParser(JsonParserOptions(stream_arguments=eager), ToolParserContext("m"))


def qwen():
    return Qwen3Parser(NoOptions(), ReasoningParserContext("m"))


def llm_with(fakes, tool=None, reasoning=None):
    return fakes.FakeAsyncLLM(max_model_len=4096, parsers=AnswerParsers(tool, reasoning))


def tell(text, **body):
    messages = [{"role": "user", "content": "tell:" + json.dumps(text)}]
    return {"messages": messages, "tools": TOOLS} | body


def ask(connect, llm, body, status=200):
    async def go():
        async with connect(llm) as client:
            response = await client.post(PATH, json=body)
            assert response.status_code == status, response.text
            return response

    return asyncio.run(go())


def joined(response):
    """A stream's choices as an answer has them, by index."""
    choices: dict[int, dict] = {}
    pieces = response.text.split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""]
    for piece in pieces[:-2]:
        for choice in json.loads(piece.removeprefix("data: "))["choices"]:
            whole = choices.setdefault(
                choice["index"], {"content": "", "reasoning": "", "calls": [], "finish": []}
            )
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(whole["calls"]):
                    assert call["id"]
                    assert call["type"] == "function"
                    whole["calls"].append([call["function"]["name"], ""])
                else:
                    assert call["index"] == len(whole["calls"]) - 1
                    assert "id" not in call
                    assert "name" not in call["function"]
                whole["calls"][-1][1] += call["function"].get("arguments", "")
            whole["finish"].append(choice["finish_reason"])
    return choices


def parts(choice):
    """An answer's choice as `joined` has it."""
    message = choice["message"]
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    return message["content"] or "", message.get("reasoning_content") or "", calls


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (CALL, "", [["get_weather", ARGUMENTS]]),
        (f"See:\n{CALL}\n{CALL}", "See:\n", [["get_weather", ARGUMENTS]] * 2),
        ('<tool_call>{"name": "get_time"}</tool_call> done', " done", [["get_time", "{}"]]),
        ("No call <tool", "No call <tool", []),
        ("<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
    ],
)
def test_streamed_is_not_streamed(  # noqa: PLR0917
    connect, fakes, text, content, calls, eager
):
    for n in (1, 2):
        body = tell(text, n=n)
        answer = ask(connect, llm_with(fakes, hermes(eager)), body).json()
        stream = ask(connect, llm_with(fakes, hermes(eager)), body | {"stream": True})
        streamed = joined(stream)
        assert len(streamed) == len(answer["choices"]) == n
        for choice in answer["choices"]:
            assert parts(choice) == (content, "", calls)
            whole = streamed[choice["index"]]
            assert (whole["content"], whole["calls"]) == (content, calls)
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            assert whole["finish"] == [None] * (len(whole["finish"]) - 1) + [
                choice["finish_reason"]
            ]
            if calls and not content:
                assert choice["message"]["content"] is None
        ids = [
            c["id"] for choice in answer["choices"] for c in choice["message"].get("tool_calls", ())
        ]
        assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_call_that_was_cut_off_ends_with_length(connect, fakes, streaming):
    limit = len('<tool_call>\n{"name": "get_weather", "arguments": {"ci')
    body = tell(CALL, max_tokens=limit, stream=streaming)
    response = ask(connect, llm_with(fakes, hermes()), body)
    if streaming:
        (whole,) = joined(response).values()
        assert whole["finish"][-1] == "length"
        assert (whole["content"], whole["calls"]) == ("", [["get_weather", '{"ci']])
    else:
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] == "length"
        assert parts(choice) == ("", "", [["get_weather", '{"ci']])


def test_without_a_parser_the_answer_is_text(connect, fakes):
    llm = llm_with(fakes)
    (choice,) = ask(connect, llm, tell(CALL)).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert llm.calls[0].prompt["prompt"].startswith("tools: 2\n")


def test_choice_none_shows_the_tools_and_finds_no_calls(connect, fakes):
    llm = llm_with(fakes, hermes())
    (choice,) = ask(connect, llm, tell(CALL, tool_choice="none")).json()["choices"]
    assert choice["message"]["content"] == CALL
    assert llm.calls[0].prompt["prompt"].startswith("tools: 2\n")


def test_without_tools_nothing_is_parsed(connect, fakes):
    (choice,) = ask(connect, llm_with(fakes, hermes()), tell(CALL, tools=None)).json()["choices"]
    assert choice["message"]["content"] == CALL


@pytest.mark.parametrize("streaming", [False, True])
def test_one_call_at_most(connect, fakes, streaming):
    body = tell(CALL + CALL, parallel_tool_calls=False, stream=streaming)
    response = ask(connect, llm_with(fakes, hermes()), body)
    if streaming:
        assert joined(response)[0]["calls"] == [["get_weather", ARGUMENTS]]
    else:
        assert parts(response.json()["choices"][0])[2] == [["get_weather", ARGUMENTS]]


def test_special_tokens_that_mark_calls_stay_in_the_text(connect, fakes):
    class Marked(HermesParser):
        special_tokens = ("<|end|>", "<|absent|>")

    llm = llm_with(fakes, Marked(JsonParserOptions(), ToolParserContext("m")))
    ask(connect, llm, tell("x"))
    ask(connect, llm, tell("x", tools=None))
    assert llm.calls[0].params.shown_special_token_ids == [fakes.END]
    assert llm.calls[1].params.shown_special_token_ids is None


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
        ({"tools": [{"function": {"name": ""}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name", "pattern"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools[1].function.name", "get_time"),
        ({"tools": {}}, "tools", "list"),
        ({"tool_choice": "any"}, "tool_choice", "any"),
        ({"tool_choice": 1}, "tool_choice", "1"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "name"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "other",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ],
)
def test_wrong_tools_are_refused(connect, fakes, change, param, says):
    llm = llm_with(fakes, hermes())
    error = ask(connect, llm, tell("x") | change, status=400).json()["error"]
    assert error["param"] == param
    assert says in error["message"]
    assert llm.calls == []


THOUGHT = "<think>\nHm, é 👍.\n</think>\n\nYes."


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        (THOUGHT, "Yes.", "Hm, é 👍.", []),
        ("Yes.", "Yes.", "", []),
        (THOUGHT + CALL, "Yes.", "Hm, é 👍.", [["get_weather", ARGUMENTS]]),
        (f"<think>{CALL}</think>No.", "No.", CALL, []),
    ],
)
def test_reasoning(  # noqa: PLR0917
    connect, fakes, streaming, text, content, reasoning, calls
):
    llm = llm_with(fakes, hermes(), qwen())
    response = ask(connect, llm, tell(text, stream=streaming))
    if streaming:
        whole = joined(response)[0]
        assert (whole["content"], whole["reasoning"], whole["calls"]) == (content, reasoning, calls)
    else:
        assert parts(response.json()["choices"][0]) == (content, reasoning, calls)


@pytest.mark.parametrize("streaming", [False, True])
def test_reasoning_can_be_left_out(connect, fakes, streaming):
    body = tell(THOUGHT, include_reasoning=False, stream=streaming)
    response = ask(connect, llm_with(fakes, None, qwen()), body)
    assert "reasoning_content" not in response.text
    assert "Hm" not in response.text.replace(json.dumps(THOUGHT), "")


def test_reasoning_of_the_history_reaches_the_template(connect, fakes):
    llm = llm_with(fakes, None, qwen())
    for name in ("reasoning_content", "reasoning"):
        message = {"role": "assistant", "content": "x", name: "because"}
        ask(connect, llm, {"messages": [message, {"role": "user", "content": "say:a"}]})
        assert llm.conversations[-1][0]["reasoning_content"] == "because"


def test_prompt_that_opens_or_closes_the_reasoning(connect, fakes):
    parser = DeepSeekR1Parser(NoOptions(), ReasoningParserContext("m"))
    for ending, expected in (("<think>So", ("b", "a")), ("<think>So</think>", ("a</think>b", ""))):
        body = {
            "messages": [
                {"role": "user", "content": "tell:" + json.dumps("a</think>b")},
                {"role": "assistant", "content": ending},
            ],
            "continue_final_message": True,
        }
        llm = llm_with(fakes, None, parser)
        llm._command = lambda text: next(x for x in text.splitlines() if x.startswith("tell:"))
        message = ask(connect, llm, body).json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"] or "") == expected


def forced(choice, text="", **more):
    return tell(text, tool_choice=choice, **more)


NAMED = {"type": "function", "function": {"name": "get_weather"}}
REQUIRED = (
    f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, '
    '{"name": "get_time", "parameters": {}}]'
)


@pytest.mark.parametrize("parser", [None, hermes(), qwen()], ids=["none", "hermes", "qwen"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "calls"),
    [
        ("required", REQUIRED, [["get_weather", ARGUMENTS], ["get_time", "{}"]]),
        (NAMED, ARGUMENTS, [["get_weather", ARGUMENTS]]),
        (NAMED, " { } ", [["get_weather", "{ }"]]),
    ],
    ids=["required", "named", "empty"],
)
def test_forced_calls(  # noqa: PLR0917
    connect, fakes, parser, streaming, choice, text, calls
):
    is_tool = isinstance(parser, HermesParser)
    llm = llm_with(fakes, parser if is_tool else None, None if is_tool else parser)
    response = ask(connect, llm, forced(choice, text, stream=streaming))
    if streaming:
        whole = joined(response)[0]
        assert (whole["content"], whole["calls"]) == ("", calls)
        assert whole["finish"][-1] == "tool_calls"
    else:
        (answer,) = response.json()["choices"]
        assert parts(answer) == ("", "", calls)
        assert answer["finish_reason"] == "tool_calls"


def test_grammars_of_forced_calls(connect, fakes):
    llm = llm_with(fakes)
    reference = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {}}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "r", "parameters": reference}}]
    ask(connect, llm, forced("required", tools=tools))
    ask(connect, llm, forced("required", tools=tools, parallel_tool_calls=False))
    ask(connect, llm, forced(NAMED))
    ask(connect, llm, forced({"type": "function", "function": {"name": "get_time"}}))
    many, one, named, bare = (json.loads(call.params.structured_outputs.json) for call in llm.calls)
    assert many["minItems"] == 1
    assert "maxItems" not in many
    assert one["maxItems"] == 1
    calls = many["items"]["anyOf"]
    assert [call["properties"]["name"]["enum"] for call in calls] == [["get_weather"], ["r"]]
    places = [call["properties"]["parameters"] for call in calls]
    assert places == [{"$ref": "#/$defs/get_weather"}, {"$ref": "#/$defs/r"}]
    moved = {"type": "object", "properties": {"x": {"$ref": "#/$defs/r/$defs/X"}}}
    assert many["$defs"]["get_weather"] == TOOLS[0]["function"]["parameters"]
    assert many["$defs"]["r"] == moved | {"$defs": {"X": {}}}
    assert named == TOOLS[0]["function"]["parameters"]
    assert bare == {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "cut", "calls"),
    [
        ("required", REQUIRED, '[{"name": "get_weather", "parameters": {"ci', '{"ci'),
        (NAMED, ARGUMENTS, '{"ci', '{"ci'),
    ],
)
def test_forced_calls_that_were_cut_off(  # noqa: PLR0917
    connect, fakes, streaming, choice, text, cut, calls
):
    body = forced(choice, text, max_tokens=len(cut), stream=streaming)
    response = ask(connect, llm_with(fakes), body)
    if streaming:
        whole = joined(response)[0]
        assert (whole["content"], whole["calls"]) == ("", [["get_weather", calls]])
        assert whole["finish"][-1] == "length"
    else:
        (answer,) = response.json()["choices"]
        assert parts(answer) == ("", "", [["get_weather", calls]])
        assert answer["finish_reason"] == "length"


def test_no_piece_of_a_forced_call_is_content(connect, fakes):
    for cut in range(len(REQUIRED)):
        body = forced("required", REQUIRED, max_tokens=cut + 1)
        (answer,) = ask(connect, llm_with(fakes), body).json()["choices"]
        assert not answer["message"]["content"], REQUIRED[: cut + 1]


def deep(levels):
    schema: dict = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return {"function": {"name": "get_weather", "parameters": schema}}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "tool_choice"),
        ({"structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [deep(80)]}, "tools"),
    ],
)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_what_cannot_be_forced_is_refused(connect, fakes, choice, change, param):
    error = ask(connect, llm_with(fakes), forced(choice) | change, status=400).json()["error"]
    assert error["param"] == param
