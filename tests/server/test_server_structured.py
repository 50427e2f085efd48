"""response_format and structured_outputs as the engine gets them, and what is refused before it."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from octavo import StructuredOutputsParams
from octavo.core.errors import RequestError

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


def chat(more: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **more}


def post(connect, fake, body, path=PATH):
    async def go():
        async with connect(fake) as client:
            headers = {"content-type": "application/json"}
            return await client.post(path, content=json.dumps(body), headers=headers)

    return asyncio.run(go())


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            {"json": SCHEMA},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            {"json": "true"},
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
            {"structural_tag": {"type": "structural_tag", "format": {"type": "any_text"}}},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
        (
            {"structured_outputs": {"json": "{}", "disable_any_whitespace": True}},
            {"json": {}, "disable_any_whitespace": True},
        ),
        ({"response_format": {"type": "text"}, "structured_outputs": {}}, None),
        ({"response_format": None, "structured_outputs": None}, None),
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/completions"])
def test_what_reaches_the_engine(connect, fake, more, wanted, path):
    body = chat(more) if path == PATH else {"prompt": "hi", "max_tokens": 4, **more}
    response = post(connect, fake, body, path)
    assert response.status_code == 200, response.text
    given = fake.calls[0].params.structured_outputs
    assert given == (None if wanted is None else StructuredOutputsParams(**wanted))


@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "", "exactly one of"),
        ({"structured_outputs": {"json_object": False}}, "", "got none"),
        ({"structured_outputs": {"chioce": ["a"]}}, "", "did you mean 'choice'"),
        ({"structured_outputs": {"choice": []}}, ".choice", "must not be empty"),
        ({"structured_outputs": {"choice": "ab"}}, ".choice", "list of strings"),
        ({"structured_outputs": {"choice": ["a", 1]}}, ".choice", "must be a string"),
        ({"structured_outputs": {"regex": ""}}, ".regex", "must not be empty"),
        ({"structured_outputs": {"regex": 3}}, ".regex", "must be a string"),
        ({"structured_outputs": {"regex": "a\0b"}}, ".regex", "U\\+0000"),
        ({"structured_outputs": {"json": "{"}}, ".json", "not valid JSON"),
        ({"structured_outputs": {"json": [1]}}, ".json", "must be a JSON object"),
        ({"structured_outputs": {"structural_tag": True}}, ".structural_tag", "JSON object"),
        ({"structured_outputs": {"json_object": "yes"}}, ".json_object", "true or false"),
        ({"structured_outputs": {"grammar": "x" * (1 << 20) + "x"}}, ".grammar", "limit 1048576"),
        ({"structured_outputs": [1]}, "", "object|dictionary|mapping"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "combined"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "",
            "exclude each other",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is missing"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
            "response_format",
            "belongs to type",
        ),
        ({"response_format": {"type": "json_object", "skema": {}}}, "response_format", "skema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format",
            "schema",
        ),
    ],
)
def test_refused_by_name(connect, fake, more, param, words):
    response = post(connect, fake, chat(more))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    wanted = "structured_outputs" + param if not param or param.startswith(".") else param
    assert (error["param"] or "").startswith(wanted), error
    assert re.search(words, error["message"]), error
    assert fake.calls == []


def test_a_schema_nested_too_deep_is_refused_at_once(connect, fake):
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "object", "properties": {"a": schema}}
    for more in (
        {"structured_outputs": {"json": schema}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": schema},
            }
        },
    ):
        response = post(connect, fake, chat(more))
        assert response.status_code == 400
        assert "nested too deep" in response.json()["error"]["message"]
    assert fake.calls == []


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
def test_vllms_old_names_point_to_the_new_ones(connect, fake, name):
    error = post(connect, fake, chat({f"guided_{name}": "x"})).json()["error"]
    assert f"structured_outputs: {{{name}: ...}}" in error["message"]


FUNCTION = {"name": "f", "parameters": {"type": "object"}}
FORMAT = {"type": "json_schema", "schema": SCHEMA, "name": "x"}


@pytest.mark.parametrize(
    ("path", "more", "param"),
    [
        (PATH, {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        (PATH, {"response_format": {"type": "json_object"}}, "response_format"),
        (
            PATH,
            {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
            "tools",
        ),
        ("/v1/responses", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs"),
        ("/v1/responses", {"text": {"format": FORMAT}}, "text.format"),
        (
            "/v1/responses",
            {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
            "tools",
        ),
    ],
)
def test_what_the_engine_refuses_has_the_clients_name(connect, fakes, path, more, param):
    class Refusing(fakes.FakeAsyncLLM):
        async def stream(self, *_, **__):
            raise RequestError("structured_outputs: json: no", param="structured_outputs")
            yield

    given = {"input": "hi"} if path == "/v1/responses" else chat({})
    answer = post(connect, Refusing(), {**given, **more}, path)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (param, f"{param}: json: no")
