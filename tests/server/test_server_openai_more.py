"""The real `openai` client against `octavo serve` with a real engine: asynchronous use, raw
answers, vLLM's parameters as `extra_body`, and every class of error that it knows."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest

HI = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 9}
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@pytest.fixture
def client(real_server):
    options = {"base_url": f"{real_server.url}/v1", "api_key": "none", "max_retries": 0}
    with openai.OpenAI(**options) as client:
        yield client


@pytest.fixture
def in_loop(real_server):
    """Runs `work(client)` with an asynchronous client."""

    def in_loop(work):
        async def main():
            options = {"base_url": f"{real_server.url}/v1", "api_key": "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                return await work(client)

        return asyncio.run(main())

    return in_loop


def test_vllms_parameters_as_extra_body(client):
    answer = client.completions.create(
        **GREEDY, prompt="ab", extra_body={**EXTRA, "top_k": 1, "min_p": 0.1, "min_tokens": 3}
    )
    assert len(answer.choices[0].token_ids) == 9
    ids = answer.choices[0].prompt_token_ids
    again = client.completions.create(**GREEDY, prompt=ids, extra_body=EXTRA)
    assert again.choices[0].token_ids == answer.choices[0].token_ids


def test_streams_of_completions_join_to_the_answer(client):
    several = {"prompt": ["ab", "cd"], "n": 2, "extra_body": EXTRA, "seed": 3}
    body = GREEDY | {"temperature": 1} | several
    whole = client.completions.create(**body)
    texts = [""] * 4
    with client.completions.create(**body, stream=True) as events:
        for event in events:
            for choice in event.choices:
                texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert whole.usage.completion_tokens == 36


def test_asynchronous_answers_and_streams(in_loop):
    async def work(client):
        chat = client.chat.completions
        whole = await chat.create(**GREEDY, messages=HI, extra_body=EXTRA)
        usage = {"include_usage": True}
        text, last = "", None
        events = await chat.create(
            **GREEDY, messages=HI, extra_body=EXTRA, stream=True, stream_options=usage
        )
        async for event in events:
            text += "".join(choice.delta.content or "" for choice in event.choices)
            last = event.usage or last
        assert text == whole.choices[0].message.content
        assert last.completion_tokens == whole.usage.completion_tokens == 9
        models = [model.id async for model in client.models.list()]
        assert models == ["tiny"]

    in_loop(work)


def test_a_stream_that_is_left_frees_its_request(client, real_server):
    body = {"model": "tiny", "prompt": "ab", "extra_body": {"ignore_eos": True}}
    with client.completions.create(**body, stream=True) as events:
        next(iter(events))
    deadline = time.monotonic() + 60
    while real_server.client.get("/load").json() != {"server_load": 0}:
        assert time.monotonic() < deadline
    real_server.check_control()


def test_raw_answers(client):
    raw = client.chat.completions.with_raw_response.create(
        **GREEDY, messages=HI, extra_headers={"x-request-id": "mine"}
    )
    assert raw.status_code == 200
    assert raw.headers["x-request-id"] == "chatcmpl-mine" == raw.parse().id
    assert json.loads(raw.http_response.content)["object"] == "chat.completion"
    with client.completions.with_streaming_response.create(
        **GREEDY, prompt="ab", stream=True
    ) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


@pytest.mark.parametrize(
    "case",
    [
        ({"temperature": -1}, 400, "temperature"),
        ({"logit_bias": {"99999999": 5}}, 400, "logit_bias"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1000}, 400, "prompt"),
        ({"model": "gpt-4o"}, 404, "model"),
        ({"user": "x" * (2 << 20)}, 413, None),
        ({"extra_headers": {"content-type": "text/plain"}}, 415, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors(client, real_server, case, stream):
    body, status, param = case
    kinds = {400: openai.BadRequestError, 404: openai.NotFoundError}
    with pytest.raises(kinds.get(status, openai.APIStatusError)) as caught:
        client.completions.create(**GREEDY | {"prompt": "ab"} | body, stream=stream)
    error = caught.value
    assert error.status_code == status
    assert error.body["type"] == "invalid_request_error"
    assert error.body["param"] == param
    assert error.body["message"] in str(error)
    real_server.check_control()


def test_a_server_that_loads_is_asked_again(fakes, monkeypatch):
    """503 with Retry-After: the client waits and succeeds."""
    from octavo.server.app.app import create_app
    from octavo.server.config import ServiceConfig

    monkeypatch.setattr("octavo.server.http.errors.RETRY_AFTER_S", 0.05)
    app = create_app(fakes.FakeAsyncLLM(start_delay=0.1), ServiceConfig())

    async def main():
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            openai.AsyncOpenAI(
                base_url="http://test/v1",
                api_key="none",
                max_retries=20,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client,
        ):
            return await client.completions.create(model="octavo", prompt="say:fine")

    assert asyncio.run(main()).choices[0].text == "fine"
