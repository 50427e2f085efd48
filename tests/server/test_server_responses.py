"""`/v1/responses`, mostly with the real `openai` client over real HTTP."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pydantic
import pytest

from octavo.core.contracts import NoOptions
from octavo.server.contracts.reasoning_parser import ReasoningParserContext
from octavo.server.contracts.tool_parser import ToolParserContext
from octavo.server.openai.answer import AnswerParsers
from octavo.server.openai.protocol.responses import ResponsesEvent
from octavo.server.reasoning_parsers.think import Qwen3Parser
from octavo.server.tool_parsers.hermes import HermesParser
from octavo.server.tool_parsers.options import JsonParserOptions

ANSWER = "Grüße 😀, ok."
TOOLS = [
    {
        "type": "function",
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    }
]
ARGUMENTS = '{"city": "São \\"P\\""}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
THOUGHT = "<think>\nHm.\n</think>\n\n"


@pytest.fixture(scope="module")
def live(live_over, fakes):
    parsers = AnswerParsers(
        HermesParser(JsonParserOptions(), ToolParserContext("m")),
        Qwen3Parser(NoOptions(), ReasoningParserContext("m")),
    )
    llm = fakes.FakeAsyncLLM(max_model_len=4096, parsers=parsers)
    with live_over(llm) as found:
        yield found


@pytest.fixture(scope="module")
def plain(live_over, fakes):
    """Without parsers."""
    with live_over(fakes.FakeAsyncLLM(max_model_len=4096)) as found:
        yield found


def connect(live):
    return openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(live):
    with connect(live) as client:
        yield client


def tell(text):
    return "tell:" + json.dumps(text)


def test_text(client):
    answer = client.responses.create(model="fake", input="hi", metadata={"a": "b"})
    assert answer.output_text == ANSWER
    assert (answer.status, answer.model, answer.metadata) == ("completed", "fake", {"a": "b"})
    assert answer.id.startswith("resp_")
    (message,) = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.content[0].annotations == []
    usage = answer.usage
    assert usage.input_tokens == len("user\nhi\nassistant\n")
    assert usage.output_tokens == len(ANSWER.encode()) + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == 3
    assert usage.output_tokens_details.reasoning_tokens == 0
    raw = client.responses.with_raw_response.create(model="fake", input="hi")
    assert json.loads(raw.text)["store"] is False, "what is not stored is not said to be"


def test_reasoning_text_and_calls(client):
    answer = client.responses.create(
        model="fake", input=tell(f"{THOUGHT}See: {CALL} then {CALL}"), tools=TOOLS
    )
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "message", "function_call"]
    assert answer.output[0].content[0].text == "Hm."
    assert answer.output_text == "See:  then "
    for call in (answer.output[2], answer.output[4]):
        assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    assert answer.output[2].call_id != answer.output[4].call_id
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.")


TEXT = "added content_part.added {0}.delta {0}.done content_part.done output_item.done"
SEQUENCE = [
    f"response.{kind}"
    for kind in [
        *["created", "in_progress"],
        *f"output_item.{TEXT.format('reasoning_text')}".split(),
        *f"output_item.{TEXT.format('output_text')}".split(),
        *["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"],
        *["output_item.done", "completed"],
    ]
]


def once(kinds):
    """Without repetitions of deltas."""
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


def test_streamed_events(client):
    body = {"model": "fake", "input": tell(f"{THOUGHT}See:{CALL}"), "tools": TOOLS}
    whole = client.responses.create(**body)
    events = list(client.responses.create(**body, stream=True))
    assert once([event.type for event in events]) == SEQUENCE
    assert [event.sequence_number for event in events] == list(range(len(events)))
    final = events[-1].response

    def content(response):
        items = [item.to_dict() for item in response.output]
        for item in items:
            item.pop("id")
            item.pop("call_id", None)
        return items

    assert content(final) == content(whole)
    assert final.usage == whole.usage
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        deltas = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert deltas == text
        assert mine[-1].item == item
        assert {event.item_id for event in mine if hasattr(event, "item_id")} == {item.id}
        (done,) = [e for e in mine if e.type.endswith(("text.done", "arguments.done"))]
        assert text == (done.arguments if item.type == "function_call" else done.text)
    assert events[0].response.output == []
    assert events[0].response.status == "in_progress"


def test_stream_helper(client):
    with client.responses.stream(model="fake", input=tell("x" + CALL), tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "x"
    assert final.output[1].arguments == ARGUMENTS


def test_async(live):
    async def go():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(client.responses.create(model="fake", input=f"say:{i}") for i in range(8))
            )
            assert [answer.output_text for answer in answers] == [str(i) for i in range(8)]
            async with client.responses.stream(model="fake", input="say:abc") as stream:
                async for _ in stream:
                    pass
                assert (await stream.get_final_response()).output_text == "abc"

    asyncio.run(go())


def test_the_limit_makes_it_incomplete(client):
    answer = client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.output_text == "Gr"
    events = list(
        client.responses.create(
            model="fake",
            input=tell(CALL),
            tools=TOOLS,
            max_output_tokens=CALL.index("ão"),
            stream=True,
        )
    )
    assert events[-1].type == "response.incomplete"
    (call,) = events[-1].response.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)
    assert call.arguments


def test_an_empty_answer_has_an_empty_message(client):
    answer = client.responses.create(model="fake", input="tell:" + json.dumps(""))
    assert answer.output_text == ""
    assert answer.output[0].type == "message"


def test_error_in_mid_stream(client):
    events = list(client.responses.create(model="fake", input="fail:2", stream=True))
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.code == "server_error"
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="fake", input="fail:1")


def test_logprobs(plain):
    with connect(plain) as client:
        answer = client.responses.create(
            model="fake", input="hi", include=["message.output_text.logprobs"], top_logprobs=2
        )
        logprobs = answer.output[0].content[0].logprobs
        assert b"".join(bytes(item.bytes) for item in logprobs).decode() == ANSWER
        assert all(len(item.top_logprobs) == 2 for item in logprobs)
        events = list(
            client.responses.create(
                model="fake",
                input="hi",
                include=["message.output_text.logprobs"],
                top_logprobs=2,
                stream=True,
            )
        )
        assert events[-1].response.output[0].content[0].logprobs == logprobs


ITEMS = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "What"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "because"}],
    },
    {
        "type": "message",
        "role": "assistant",
        "id": "msg_1",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Let me see", "annotations": []}],
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
    {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
    {
        "type": "function_call_output",
        "call_id": "c2",
        "output": [{"type": "input_text", "text": "warm"}],
    },
    {"role": "user", "content": "say:fine"},
]


def test_items_become_messages(live, client):
    answer = client.responses.create(model="fake", input=ITEMS, instructions="You help.")
    assert answer.output_text == "fine"
    assert live.llm.conversations[-1] == [
        {"role": "system", "content": "You help."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "What"},
        {
            "role": "assistant",
            "content": "Let me see",
            "reasoning_content": "because",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny", "name": "f"},
        {"role": "tool", "tool_call_id": "c2", "content": "warm", "name": "g"},
        {"role": "user", "content": "say:fine"},
    ]


def test_output_can_be_sent_back(live, client):
    first = client.responses.create(model="fake", input=tell(f"{THOUGHT}See:{CALL}"), tools=TOOLS)
    call = first.output[-1]
    back = [{"role": "user", "content": "weather?"}, *first.output]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    back.append({"role": "user", "content": "say:thanks"})
    answer = client.responses.create(model="fake", input=back, tools=TOOLS)
    assert answer.output_text == "thanks"
    message = live.llm.conversations[-1][1]
    assert (message["content"], message["reasoning_content"]) == ("See:", "Hm.")
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": 'São "P"'}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 3}, "input"),
        ({"input": None}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "arguments": "{}"}]},
            "input[0].name",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"temperature": 999}, "temperature"),
    ],
)
def test_wrong_values_are_refused(live, change, param):
    response = httpx.post(f"{live.url}/v1/responses", json={"input": "hi"} | change, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("context_management", [{"type": "compaction"}]),
        ("max_tool_calls", 3),
        ("moderation", {}),
        ("previous_response_id", "resp_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("service_tier", "flex"),
        ("store", True),
        ("stream_options", {"include_obfuscation": True}),
        ("truncation", "auto"),
        ("n", 2),
        ("max_tokens", 3),
        ("response_format", {"type": "json_object"}),
    ],
)
def test_known_and_unsupported_is_refused_by_name(live, name, value):
    calls = len(live.llm.calls)
    response = httpx.post(f"{live.url}/v1/responses", json={"input": "hi", name: value}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert name in error["message"]
    assert len(live.llm.calls) == calls


def test_what_asks_for_nothing_is_accepted(live):
    inert = {
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"],
        "previous_response_id": None,
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
    }
    response = httpx.post(f"{live.url}/v1/responses", json={"input": "say:x"} | inert, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["output"][0]["content"][0]["text"] == "x"


def test_events_are_what_the_model_says(live):
    body = {"input": tell(f"{THOUGHT}See:{CALL}"), "tools": TOOLS, "stream": True}
    text = httpx.post(f"{live.url}/v1/responses", json=body, timeout=60).text
    pieces = text.split("\n\n")
    assert pieces[-1] == ""
    for piece in pieces[:-1]:
        first, second = piece.split("\n")
        event = ResponsesEvent.model_validate_json(second.removeprefix("data: "))
        assert first == f"event: {event.type}"


def test_nothing_can_be_retrieved(client):
    answer = client.responses.create(model="fake", input="say:x")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)


def test_formats_reach_the_engine(live, client):
    class City(pydantic.BaseModel):
        name: str

    answer = client.responses.parse(model="fake", input=tell('{"name": "Rome"}'), text_format=City)
    assert answer.output_parsed == City(name="Rome")
    wanted = json.loads(live.llm.calls[-1].params.structured_outputs.json)
    assert wanted["properties"]["name"]["type"] == "string"
    client.responses.create(model="fake", input="hi", text={"format": {"type": "json_object"}})
    assert live.llm.calls[-1].params.structured_outputs.json_object
    choice = {"type": "function", "name": "get_weather"}
    answer = client.responses.create(
        model="fake", input=tell(ARGUMENTS), tools=TOOLS, tool_choice=choice
    )
    (call,) = answer.output
    assert (call.type, call.arguments) == ("function_call", ARGUMENTS)
    assert answer.tool_choice.name == "get_weather"
    for text in (
        {"format": {"type": "json_schema", "name": "x"}},
        {"format": {"type": "json_object", "schema": {}}},
    ):
        response = httpx.post(
            f"{live.url}/v1/responses", json={"input": "hi", "text": text}, timeout=60
        )
        assert response.json()["error"]["param"] == "text.format.schema"
