"""Structured output from a real server: the `openai` client, xgrammar, a tiny model."""

from __future__ import annotations

import concurrent.futures
import json
import re
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel

pytest.importorskip("xgrammar")

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


class Answer(BaseModel):
    ok: bool


class Nested(BaseModel):
    kind: Literal["a", "b"]
    inner: Answer | None


@pytest.fixture(scope="module")
def client(real_server):
    url = f"{real_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize("model", [Answer, Nested])
@pytest.mark.parametrize("seed", [1, 2])
def test_parse_with_a_pydantic_model(client, model, seed):
    answer = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=model, seed=seed, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, model)
    assert answer.choices[0].finish_reason == "stop"


def test_parse_while_streaming(client):
    with client.chat.completions.stream(
        model="tiny", messages=HI, response_format=Answer, seed=3, max_tokens=100
    ) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Answer)


def test_json_object(client):
    answer = client.chat.completions.create(
        model="tiny",
        messages=HI,
        response_format={"type": "json_object"},
        temperature=0,
        max_tokens=40,
        logit_bias={"93": 30},  # the closing brace
    )
    assert answer.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        ({"regex": "[a-c]{2,4}[0-9]{2}"}, "[a-c]{2,4}[0-9]{2}"),
        ({"choice": ["yes", "no", "a quick fox"]}, "yes|no|a quick fox"),
        ({"grammar": 'root ::= "a" b\nb ::= ("x" | "yz"){1, 3}'}, "a(x|yz){1,3}"),
    ],
)
def test_completions(client, spec, pattern):
    answer = client.completions.create(
        model="tiny",
        prompt=["hi", "the quick"],
        n=2,
        max_tokens=60,
        seed=5,
        logprobs=2,
        extra_body={"structured_outputs": spec},
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text), choice.text
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"structured_outputs": {"regex": "[a-"}}, "structured_outputs", "Unclosed"),
        ({"structured_outputs": {"regex": "(" * 4000}}, "structured_outputs", "cannot be compiled"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "'not'"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs", "not defined"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"uniqueItems": True}},
                }
            },
            "response_format",
            "uniqueItems",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_a_400_before_the_answer_begins(real_server, body, param, words, stream):
    body = {"messages": HI, "max_tokens": 4, "stream": stream} | body
    answer = real_server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    real_server.check_control()


def test_a_bad_schema_of_a_tool_is_told_by_its_name(real_server):
    def tool(name, **parameters):
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    tools = [tool("a.good-one:x", type="object"), tool("bad", type="strange")]
    body = {"messages": HI, "tool_choice": "required", "max_tokens": 4}
    assert real_server.client.post(CHAT, json=body | {"tools": tools[:1]}).status_code == 200
    error = real_server.client.post(CHAT, json=body | {"tools": tools}).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("tools: json: #/$defs/bad: 'type' must be one of")


def test_a_refused_grammar_counts_as_no_request(real_server):
    def counted():
        lines = real_server.client.get("/metrics").text.splitlines()
        return [line for line in lines if line.startswith("octavo:request_success_total")]

    before = counted()
    body = {"prompt": ["hi", "the quick"], "structured_outputs": {"regex": "[b-"}, "n": 2}
    for stream in (False, True):
        answer = real_server.client.post("/v1/completions", json=body | {"stream": stream})
        assert answer.status_code == 400
    assert counted() == before
    real_server.check_control()
    assert counted() != before


def test_others_do_not_notice(real_server):
    """Grammars, good and bad, beside the control request."""
    specs = [
        {"regex": "[a-z]{1,300}"},
        {"regex": "((("},
        {"json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"choice": [f"choice {i}" for i in range(200)]},
    ]

    def ask(spec):
        body = {"prompt": "hi", "max_tokens": 30, "structured_outputs": spec}
        return real_server.client.post("/v1/completions", json=body).status_code

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, spec) for spec in specs * 2]
        for _ in range(4):
            real_server.check_control()
        statuses = [future.result() for future in asked]
    assert statuses == [200, 400, 200, 200] * 2


def test_the_api_process_imports_neither_torch_nor_xgrammar(real_server):
    ask = {"prompt": "hi", "max_tokens": 9, "structured_outputs": {"regex": "abc"}}
    assert (
        real_server.client.post("/v1/completions", json=ask).json()["choices"][0]["text"] == "abc"
    )
    maps = Path(f"/proc/{real_server.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert "xgrammar" not in maps


def test_validates_against_the_schema(real_server):
    schema = {
        "type": "object",
        "properties": {
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        },
        "required": ["n", "tags"],
    }
    spec = {"json": schema, "disable_any_whitespace": True}
    body = {"prompt": "hi", "max_tokens": 60, "structured_outputs": spec, "n": 4, "seed": 1}
    answer = real_server.client.post("/v1/completions", json=body).json()
    validator = pytest.importorskip("jsonschema_rs").validator_for(schema)
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop"
        assert validator.is_valid(json.loads(choice["text"])), choice["text"]
