"""`server.stream_interval` and `observability.log_requests`."""

from __future__ import annotations

import asyncio
import functools
import json
import logging

import httpx
import pytest

from octavo.frontend.outputs import CompletionOutput
from octavo.server.app.app import create_app
from octavo.server.config import ServiceConfig


def in_loop(test):
    """Run an asynchronous test."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def events(text):
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(("interval", "sizes"), [(1, [1] * 10), (4, [1, 4, 4, 1]), (99, [1, 9])])
@in_loop
async def test_tokens_share_events(connect, fake, interval, sizes):
    body = {"prompt": "say:abcdefghij", "stream": True, "max_tokens": 10, "logprobs": 0, "n": 2}
    async with connect(fake, stream_interval=interval) as client:
        answer = (await client.post("/v1/completions", json={**body, "stream": False})).json()
        streamed = events((await client.post("/v1/completions", json=body)).text)
    for choice in answer["choices"]:
        parts = [
            part
            for event in streamed
            for part in event["choices"]
            if part["index"] == choice["index"]
        ]
        assert "".join(part["text"] for part in parts) == choice["text"] == "abcdefghij"
        assert [len(part["logprobs"]["tokens"]) for part in parts] == sizes
        assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["length"]
        tokens = [value for part in parts for value in part["logprobs"]["token_logprobs"]]
        assert tokens == choice["logprobs"]["token_logprobs"]


def test_joining_deltas_copies_no_logprobs(fakes):
    joined = CompletionOutput(0, "", [], logprobs=[])

    def add(token):
        joined.extend(CompletionOutput(0, "a", [token], logprobs=[fakes.logprobs(token, 0)]))
        return joined.logprobs

    found = add(0)
    assert add(1) is found
    assert add(2) is found
    assert [list(entries) for entries in found] == [[0], [1], [2]]
    assert joined.text == "aaa"


@in_loop
async def test_usage_so_far_counts_what_was_sent(connect, fake):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "say:abcdef", "stream": True, "max_tokens": 6, "stream_options": options}
    async with connect(fake, stream_interval=3) as client:
        streamed = events((await client.post("/v1/completions", json=body)).text)
    assert [event["usage"]["completion_tokens"] for event in streamed] == [1, 4, 6, 6]


@pytest.mark.parametrize("prompts", [False, True])
@in_loop
async def test_requests_are_logged_and_prompts_only_when_asked_for(fake, caplog, prompts):
    config = ServiceConfig.model_validate(
        {"observability": {"log_requests": True, "log_prompts": prompts}}
    )
    app = create_app(fake, config)
    async with app.router.lifespan_context(app):
        await app.state.server.started.wait()
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            with caplog.at_level(logging.INFO, logger="octavo"):
                body = {"prompt": "canary\nline", "max_tokens": 3, "stop": "canary2"}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
    (line,) = [r.getMessage() for r in caplog.records if r.name == "octavo.server.requests"]
    assert "\n" not in line
    assert "prompt_tokens=12 n=1 max_tokens=3 temperature=0.6" in line
    assert ("canary\\nline" in line) is prompts
    assert "canary2" not in line
