"""The real `openai` client against a real HTTP server."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import socket
import time

import httpx
import openai
import pytest
from openai.resources import Completions
from openai.resources.chat import Completions as ChatCompletions
from openai.resources.responses import Responses

from octavo.server.openai.protocol.chat import ChatRequest
from octavo.server.openai.protocol.completions import CompletionRequest
from octavo.server.openai.protocol.responses import ResponsesRequest

ANSWER = "Grüße 😀, ok."
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def slow_calls(live):
    return [call for call in live.llm.calls if "slow" in (call.prompt.get("prompt") or "")]


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("create", "request_class"),
    [
        (ChatCompletions.create, ChatRequest),
        (Completions.create, CompletionRequest),
        (Responses.create, ResponsesRequest),
    ],
)
def test_every_parameter_of_the_client_is_known(create, request_class):
    names = set(inspect.signature(create).parameters)
    names -= {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert len(names) > 15
    known = {*request_class.model_fields, *request_class.unsupported, *request_class.hints}
    assert names <= known


def test_models(client):
    models = list(client.models.list())
    assert [model.id for model in models] == ["fake", "alias"]
    assert models[0].max_model_len == 4096
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat(client):
    answer = client.chat.completions.create(model="fake", messages=HI, n=2)
    assert [choice.message.content for choice in answer.choices] == [ANSWER] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert answer.usage.completion_tokens == 2 * (len(ANSWER.encode()) + 1)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_stream(client):
    whole = client.chat.completions.create(model="fake", messages=HI)
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HI, stream=True, stream_options={"include_usage": True}
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_stream_helper_joins_the_chunks(client):
    with client.chat.completions.stream(model="fake", messages=HI) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ANSWER


def test_chat_logprobs(client):
    answer = client.chat.completions.create(
        model="fake", messages=HI, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(item.bytes) for item in content).decode() == ANSWER
    assert [len(item.top_logprobs) for item in content] == [2] * len(content)


def test_completions(client):
    answer = client.completions.create(
        model="fake", prompt=["say:a", "say:b"], echo=True, logprobs=0
    )
    assert [choice.text for choice in answer.choices] == ["say:aa", "say:bb"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    parts = client.completions.create(model="fake", prompt="say:abc", stream=True)
    assert "".join(part.choices[0].text for part in parts) == "abc"


def test_async_streams_side_by_side(live):
    async def one(client, number):
        text = ""
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": f"say:{number}"}], stream=True
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        return text

    async def go():
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert asyncio.run(go()) == [str(number) for number in range(32)]


def test_errors_are_the_clients_own(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HI)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wild:
        client.chat.completions.create(model="fake", messages=HI, temperature=999999)
    assert wild.value.param == "temperature"
    assert wild.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="fake", prompt=[1] * 4000, max_tokens=97)
    assert long.value.code == "context_length_exceeded"
    assert "4000" in long.value.message
    assert "97" in long.value.message
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="fake", prompt="fail:1")


def test_error_in_mid_stream(client):
    stream = client.completions.create(model="fake", prompt="fail:2", stream=True)
    assert [next(stream).choices[0].text for _ in range(2)] == ["G", "r"]
    with pytest.raises(openai.APIError, match="internal error"):
        next(stream)


@pytest.mark.parametrize("streaming", [False, True])
def test_client_that_closes_its_connection_aborts(live, streaming):
    before, calls = set(live.llm.aborted), len(live.llm.calls)
    body = json.dumps({"prompt": "slow", "stream": streaming, "max_tokens": 4000}).encode()
    url = httpx.URL(live.url)
    with socket.create_connection((url.host, url.port), timeout=60) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        wait_for(lambda: len(live.llm.calls) > calls)
        if streaming:
            assert connection.recv(65536)
    wait_for(lambda: len(set(live.llm.aborted) - before) == 1)
    wait_for(lambda: httpx.get(f"{live.url}/load", timeout=60).json() == {"server_load": 0})


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_40_mb_is_a_413(live, chunked):
    data = b"x" * (40 << 20)
    pieces = (data[at : at + 65536] for at in range(0, len(data), 65536))
    headers = {"content-type": "application/json"}
    for _ in range(2):
        response = httpx.post(
            f"{live.url}/v1/completions",
            content=pieces if chunked else data,
            headers=headers,
            timeout=60,
        )
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
        pieces = iter([data])


def test_headers_over_the_limit(live):
    headers = {"x-huge": "x" * 200_000}
    # The connection may be closed before all of it was sent.
    with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadError):
        assert 400 <= httpx.get(f"{live.url}/health", headers=headers, timeout=60).status_code < 500
    assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200


def test_raw_garbage(live):
    headers = {"content-type": "application/json"}
    for content in (b"{", b'{"prompt": NaN}', b"[" * 50000, b"\xff\xfe"):
        response = httpx.post(
            f"{live.url}/v1/completions", content=content, headers=headers, timeout=60
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "invalid_json"
    assert httpx.get(f"{live.url}/health", timeout=60).status_code == 200
