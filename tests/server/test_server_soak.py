"""A soak over real HTTP: thousands of mixed requests, many of whose clients leave, after which the
server is as it was."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from octavo.server.app.routes import OPERATIONS

SERVED = {operation.path for operation in OPERATIONS}
TOTAL, WARM_UP, AT_ONCE = 2000, 700, 24
GROWTH = 16 << 20
"""Bytes that a process may have grown after the warm-up: arenas of the allocator, not requests."""


def request(dice):
    """Path and body of a random request, some of them wrong."""
    body = {
        "max_tokens": dice.randint(1, 40),
        "temperature": dice.choice([0, 0.7, 1.5]),
        "ignore_eos": dice.random() < 0.5,
    }
    length = dice.choice([1, 10, 60, 80])
    if dice.random() < 0.3:
        body |= {"n": dice.randint(2, 4)}
    if dice.random() < 0.3:
        body |= {"seed": dice.randrange(100)}
    if dice.random() < 0.2:
        body |= {"stop": ["a", "zz"], "min_tokens": 1}
    if dice.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "logit_bias": {"65": 2}, "bad_words": ["fox"]}
    if dice.random() < 0.1:
        body |= {"structured_outputs": {"regex": f"[ab]{{1,{dice.randint(2, 9)}}}"}}
    if dice.random() < 0.5:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if dice.random() < 0.05:
        body |= dice.choice([{"temperature": -1}, {"max_tokens": 1000}, {"n": 99}, {"stop": 3}])
    if dice.random() < 0.1 and "/v1/responses" in SERVED:
        few = {"max_output_tokens": dice.randint(1, 40), "stream": dice.random() < 0.5}
        return "/v1/responses", few | {"input": "the quick brown fox", "temperature": 0}
    if dice.random() < 0.4:
        text = "the quick brown fox "[: length % 20 + 1]
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 3}
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    prompt = [dice.randrange(250) for _ in range(length)]
    if dice.random() < 0.3:
        body |= {"logprobs": 2, "echo": True}
    if dice.random() < 0.2:
        return "/v1/completions", body | {"prompt": [prompt, prompt[:5], [1, 2]]}
    return "/v1/completions", body | {"prompt": prompt}


async def send(client, dice):
    """One request, which its client may leave at any time; the status, None when it left."""
    path, body = request(dice)
    leaves = dice.random() < 0.3
    try:
        async with asyncio.timeout(dice.random() / 10 if leaves else 60):
            if not body.get("stream"):
                return (await client.post(path, json=body)).status_code
            events = dice.randint(1, 5) if leaves else None
            async with client.stream("POST", path, json=body) as answer:
                async for line in answer.aiter_lines():
                    assert not line.startswith('data: {"error"'), line
                    if line and events is not None:
                        events -= 1
                        if events == 0:
                            return None
                return answer.status_code
    except TimeoutError:
        assert leaves, "an answer within a minute"
        return None


async def soak(url, count, dice):
    """`count` requests, `AT_ONCE` at a time: how often each status came."""
    statuses: dict[int | None, int] = {}
    numbers = iter(range(count))

    async def worker(client):
        for _ in numbers:
            status = await send(client, dice)
            statuses[status] = statuses.get(status, 0) + 1

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=60) as client:
        await asyncio.gather(*(worker(client) for _ in range(AT_ONCE)))
    return statuses


@pytest.mark.slow
def test_nothing_is_left_and_memory_does_not_grow(real_server):
    dice = random.Random(20261129)
    asyncio.run(soak(real_server.url, WARM_UP, dice))
    real_server.idle()
    before = real_server.rss()
    statuses = asyncio.run(soak(real_server.url, TOTAL - WARM_UP, dice))
    assert set(statuses) == {200, 400, None}, statuses
    assert statuses[200] > 700
    assert statuses[None] > 200
    real_server.idle()
    after = real_server.rss()
    assert {
        pid: size - before[pid] for pid, size in after.items() if size > before[pid] + GROWTH
    } == {}
    real_server.check_control()
    assert not [line for line in real_server.lines if "Traceback" in line]
