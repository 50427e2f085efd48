"""Tools and responses end to end: `octavo serve` with the demo model, the `openai` client."""

from __future__ import annotations

import json

import openai
import pydantic
import pytest

pytestmark = pytest.mark.slow

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_time", "description": "The time."}},
]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
COMMAND = (
    "--served-model-name demo --enable-auto-tool-choice --tool-call-parser hermes "
    "--reasoning-parser qwen3 --max-model-len 1024 --set kv_cache.num_blocks=128"
)


@pytest.fixture(scope="module")
def client(serve, demo_model):
    with (
        serve(*COMMAND.split(), "--model", demo_model) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client, **body):
    return client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=120, **body
    )


def test_required(client):
    answer = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    arguments = json.loads(call.function.arguments)
    assert call.function.name in ("get_weather", "get_time")
    if call.function.name == "get_weather":
        assert list(arguments) == ["city"]
    streamed = ask(
        client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
    )
    deltas = [
        call
        for chunk in streamed
        for choice in chunk.choices
        for call in choice.delta.tool_calls or ()
    ]
    assert deltas[0].function.name == call.function.name
    joined = "".join(delta.function.arguments or "" for delta in deltas)
    assert joined == call.function.arguments


def test_named_with_several_choices(client):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model="demo", messages=QUESTION, tools=TOOLS, tool_choice=choice, n=3, seed=1, max_tokens=60
    )
    for each in answer.choices:
        (call,) = each.message.tool_calls
        assert call.function.name == "get_weather"
        if each.finish_reason == "tool_calls":
            assert list(json.loads(call.function.arguments)) == ["city"]
        else:
            assert each.finish_reason == "length"


def test_auto_streams_what_it_answers(client):
    answer = ask(client, tools=TOOLS).choices[0].message
    chunks = ask(client, tools=TOOLS, stream=True)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == (answer.content or "")


def test_responses(client):
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)

    answer = client.responses.create(
        model="demo", input="What is the capital of France? Answer briefly.", temperature=0
    )
    assert answer.output_text == "The capital of France is Paris."
    parsed = client.responses.parse(
        model="demo",
        input="Name the capital of France as JSON.",
        text_format=City,
        temperature=0,
        max_output_tokens=60,
    )
    assert parsed.output_parsed.name
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    with client.responses.stream(
        model="demo", input="The weather in Paris?", tools=flat, tool_choice="required",
        parallel_tool_calls=False, temperature=0, max_output_tokens=120,
    ) as stream:  # fmt: skip
        for _ in stream:
            pass
        final = stream.get_final_response()
    (call,) = final.output
    assert call.type == "function_call"
    json.loads(call.arguments)
