"""The server over the real `AsyncLLM`, scheduler and KV cache manager, with a worker that computes
tokens from the cached ones: what lost or shared blocks would change, the answers show."""

from __future__ import annotations

import asyncio
import itertools
import json
import random

import pytest

from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.client import ThreadClient
from octavo.frontend.text.inputs import InputProcessor
from octavo.server.app.app import create_app
from octavo.server.config import ServiceConfig
from octavo.testing.byte_tokenizer import ByteTokenizer
from octavo.testing.fake_engine import assert_clean, make_fake_engine

LENGTH = 96


class Setup:
    """An app over a small engine. `engine` is there once it has started."""

    def __init__(self, **engine) -> None:
        def build():
            self.engine = make_fake_engine(max_model_len=LENGTH, **engine)
            return self.engine

        inputs = InputProcessor(ByteTokenizer(), max_model_len=LENGTH, vocab_size=97)
        self.llm = AsyncLLM.from_client(ThreadClient(build), inputs)
        self.app = create_app(self.llm, ServiceConfig())

    async def post(self, body, leave_after=None):
        """The status and body of an answer; leaves after so many messages of the response."""
        sent, left = [], asyncio.Event()
        requests = [json.dumps(body).encode()]

        async def receive():
            if requests:
                return {"type": "http.request", "body": requests.pop(), "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)
            if leave_after is not None and len(sent) > leave_after:
                left.set()

        if leave_after == 0:
            asyncio.get_running_loop().call_later(random.random() / 50, left.set)
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "root_path": "",
        }
        await asyncio.wait_for(self.app(scope, receive, send), 120)
        content = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"] if sent else None, content.decode()

    async def quiet(self):
        """Wait until the engine has forgotten everything."""
        for _ in range(2000):
            metrics = await self.llm.metrics()
            if not self.engine.has_work() and metrics is not None:
                return
            await asyncio.sleep(0.005)
        raise AssertionError("the engine still has work")


def run(setup, work):
    async def main():
        async with setup.app.router.lifespan_context(setup.app):
            await setup.app.state.server.started.wait()
            assert setup.app.state.server.failure is None
            await work()

    asyncio.run(main())


def ids(generator, length):
    return [generator.randrange(97) for _ in range(length)]


@pytest.mark.parametrize("streaming", [False, True])
def test_answers_do_not_depend_on_company(streaming):
    setup = Setup(num_blocks=60)
    generator = random.Random(1)
    bodies = [
        {
            "prompt": ids(generator, generator.randrange(1, 40)),
            "max_tokens": generator.randrange(1, 40),
            "seed": number,
            "n": generator.choice((1, 1, 3)),
            "return_token_ids": True,
            "ignore_eos": True,
            "stream": streaming,
        }
        for number in range(24)
    ]

    def tokens(text):
        found = {}
        pieces = (
            [p.removeprefix("data: ") for p in text.split("\n\n")[:-2]] if streaming else [text]
        )
        for piece in pieces:
            for choice in json.loads(piece)["choices"]:
                found.setdefault(choice["index"], []).extend(choice["token_ids"])
        return found

    async def work():
        alone = [tokens((await setup.post(body))[1]) for body in bodies]
        together = await asyncio.gather(*(setup.post(body) for body in bodies))
        assert [tokens(text) for _, text in together] == alone
        for body, found in zip(bodies, alone, strict=True):
            assert sorted(found) == list(range(body["n"]))
            assert all(len(part) == body["max_tokens"] for part in found.values())
        await setup.quiet()
        assert_clean(setup.engine)

    run(setup, work)


def test_a_soak_with_disconnects_leaves_nothing_behind():
    setup = Setup(num_blocks=80)
    generator = random.Random(2)
    control = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 5, "return_token_ids": True}

    def one(number):
        kind = generator.randrange(6)
        body = {
            "prompt": [ids(generator, generator.randrange(1, 50))] * generator.choice((1, 1, 2)),
            "max_tokens": generator.randrange(1, 46),
            "seed": number,
            "n": generator.choice((1, 2)),
            "stream": generator.random() < 0.5,
            "ignore_eos": True,
        }
        if kind == 0:
            body["prompt"] = [97]
        elif kind == 1:
            body["max_tokens"] = LENGTH
        leave = generator.choice((0, 1, 2, 5)) if kind in (2, 3) else None
        return setup.post(body, leave)

    async def work():
        expected = json.loads((await setup.post(control))[1])["choices"][0]["token_ids"]
        for _ in range(4):
            results = await asyncio.gather(*(one(number) for number in range(30)))
            assert {status for status, _ in results} <= {200, 400, 499, None}
            again = json.loads((await setup.post(control))[1])["choices"][0]["token_ids"]
            assert again == expected
        await setup.quiet()
        assert_clean(setup.engine)
        assert setup.app.state.server.in_flight == 0
        assert setup.app.state.server.live == set()

    run(setup, work)


def test_what_can_never_fit_is_refused_and_others_are_served():
    setup = Setup(num_blocks=10)

    async def work():
        status, text = await setup.post({"prompt": list(range(60)), "max_tokens": 2})
        assert status == 400, text
        error = json.loads(text)["error"]
        assert "60" in error["message"]
        assert "36 tokens of one sequence" in error["message"]
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        status, text = await setup.post({"prompt": [1, 2], "max_tokens": 2})
        assert status == 200, text

    run(setup, work)


def test_an_engine_that_breaks_ends_streams_with_an_error():
    setup = Setup()

    async def work():
        plan, calls = setup.engine.scheduler.plan, itertools.count()

        def breaking():
            if next(calls) == 3:
                raise TypeError("planted")
            return plan()

        setup.engine.scheduler.plan = breaking
        body = {"prompt": [1], "max_tokens": 80, "stream": True, "ignore_eos": True}
        status, text = await setup.post(body)
        last = text.strip().split("\n\n")[-1]
        if status == 200:
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_dead"
        else:
            assert (status, json.loads(text)["error"]["code"]) == (503, "engine_dead")
        status, text = await setup.post({"prompt": [1]})
        assert status == 503
        assert json.loads(text)["error"]["code"] == "engine_dead"

    run(setup, work)
