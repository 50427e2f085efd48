"""The OpenAPI document says what the server does, and docs/server.md what the models say."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest
from pydantic import ConfigDict

from octavo.server.app.app import create_app
from octavo.server.app.openapi import document
from octavo.server.app.routes import OPERATIONS
from octavo.server.command_line.reference import render
from octavo.server.config import ServiceConfig
from octavo.server.openai.protocol.chat import ChatChunk, ChatRequest, ChatResponse
from octavo.server.openai.protocol.common import Response
from octavo.server.openai.protocol.completions import CompletionRequest, CompletionResponse

HI = [{"role": "user", "content": "hi"}]
SHARED = """
model temperature top_p top_k min_p n seed stop stop_token_ids include_stop_str_in_output
max_tokens min_tokens presence_penalty frequency_penalty repetition_penalty logit_bias
allowed_token_ids bad_words logprobs prompt_logprobs ignore_eos skip_special_tokens
spaces_between_special_tokens stream stream_options user priority cache_salt request_id
return_token_ids truncate_prompt_tokens"""


def run(coroutine):
    return asyncio.run(coroutine)


@pytest.fixture(scope="module")
def spec():
    return document(OPERATIONS, "1", keys=False, open_paths=())


def test_every_route_is_in_it(spec):
    found = {(method.upper(), path) for path, item in spec["paths"].items() for method in item}
    assert found == {(op.method, op.path.replace(":path", "")) for op in OPERATIONS}
    names = [item["operationId"] for path in spec["paths"].values() for item in path.values()]
    assert len(names) == len(set(names))


def test_references_exist(spec):
    schemas = spec["components"]["schemas"]
    for name in re.findall(r'"\$ref": "#/components/schemas/([^"]+)"', json.dumps(spec)):
        assert name in schemas


@pytest.mark.parametrize(
    ("cls", "more"),
    [
        (ChatRequest, "messages top_logprobs max_completion_tokens tools tool_choice"
         " parallel_tool_calls add_generation_prompt continue_final_message chat_template_kwargs"),
        (CompletionRequest, "prompt echo"),
    ],
)  # fmt: skip
def test_known_parameters_are_taken_or_refused_by_name(spec, cls, more):
    known = spec["components"]["schemas"][cls.__name__]["properties"]
    assert set(SHARED.split()) | set(more.split()) <= set(known)
    assert {"response_format", "structured_outputs"} <= set(known)
    assert not set(known) & set(cls.unsupported)


def test_optional_parameters_take_null(spec):
    for name in ("ChatRequest", "CompletionRequest", "StreamOptions", "TokenizeTextRequest"):
        schema = spec["components"]["schemas"][name]
        for member, about in schema["properties"].items():
            if member not in schema.get("required", ()):
                assert {"type": "null"} in about["anyOf"], member
    assert "type" in spec["components"]["schemas"]["Usage"]["properties"]["prompt_tokens"]


def test_it_is_served_with_a_page(connect, fake):
    async def go():
        async with connect(fake) as client:
            served = (await client.get("/openapi.json")).json()
            assert served["paths"].keys() == {op.path.replace(":path", "") for op in OPERATIONS}
            assert "securitySchemes" not in served["components"]
            page = await client.get("/docs")
            assert page.headers["content-type"].startswith("text/html")
            for operation in OPERATIONS:
                assert operation.path.replace(":path", "") in page.text
            assert "max_completion_tokens" in page.text
            assert not re.search(r"(src|href)=.?(https?:)?//", page.text), "no outside resources"

    run(go())


def strict(model: type[Response]) -> type[Response]:
    """The model, refusing fields that it does not declare."""
    return type(model.__name__, (model,), {"model_config": ConfigDict(extra="forbid")})


def test_answers_are_what_the_models_say(connect, fake):
    async def go():
        async with connect(fake) as client:
            for operation in OPERATIONS:
                if operation.method == "GET" and operation.response is not None:
                    path = operation.path.replace("{model:path}", "fake")
                    path = path.replace("{request_id}", "known")
                    strict(operation.response).model_validate((await client.get(path)).json())
            for path, body, whole, chunk in (
                ("/v1/chat/completions", {"messages": HI}, ChatResponse, ChatChunk),
                ("/v1/completions", {"prompt": "x"}, CompletionResponse, CompletionResponse),
            ):
                body |= {"n": 2, "return_token_ids": True, "logprobs": True}
                if path == "/v1/completions":
                    body |= {"logprobs": 2, "echo": True}
                response = await client.post(path, json=body)
                strict(whole).model_validate(response.json())
                body |= {"stream": True, "stream_options": {"include_usage": True}}
                events = (await client.post(path, json=body)).text.split("\n\n")[:-2]
                for event in events:
                    strict(chunk).model_validate_json(event.removeprefix("data: "))

    run(go())


@pytest.mark.parametrize("root", ["", "/llm"])
def test_a_proxys_prefix_is_in_it(fake, root):
    app = create_app(fake, ServiceConfig())

    async def work():
        transport = httpx.ASGITransport(app=app, root_path=root)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        ):
            return (await client.get("/openapi.json")).json().get("servers")

    assert asyncio.run(work()) == ([{"url": "/llm"}] if root else None)


def test_prefix_cache_can_be_reset(connect, fake):
    async def go():
        async with connect(fake) as client:
            response = await client.post("/reset_prefix_cache")
            assert response.json() == {"success": True}
            assert (await client.get("/reset_prefix_cache")).status_code == 405

    run(go())


def test_the_page_in_docs_is_fresh(repository):
    page = (repository / "docs" / "server.md").read_text()
    assert page == render(page), "run `make docs`"
