"""The route on a real engine, without a socket."""

import asyncio
import math

from starlette.applications import Starlette

from octavo import AsyncLLM, RequestError
from octavo.server.contracts.route import RouteContext
from octavo_perplexity.route import PerplexityOptions, PerplexityRoutes


async def post(app, body):
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/perplexity", "raw_path": b"/perplexity", "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip
    await app(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent)


def test_a_text_and_mistakes(octavo_tiny_model):
    async def main():
        import json

        engine = AsyncLLM(str(octavo_tiny_model), config={"kv_cache": {"num_blocks": 40}})
        await engine.start()
        try:
            plugin = PerplexityRoutes(PerplexityOptions(max_characters=50), RouteContext(engine))
            app = Starlette(routes=list(plugin.routes()))
            found = json.loads(await post(app, b'{"text": "the quick brown fox"}'))
            assert found["tokens"] > 2
            assert found["logprob"] < 0
            assert math.isclose(found["perplexity"], math.exp(-found["logprob"] / found["tokens"]))
            one = json.loads(await post(app, b'{"text": "a"}'))
            assert one == {"tokens": 0, "logprob": 0.0, "perplexity": None}
            for body in (
                b"{",
                b"[]",
                b'{"text": 3}',
                b'{"text": ""}',
                b'{"text": "%s"}' % (b"x" * 51),
            ):
                try:
                    await post(app, body)
                except RequestError:
                    continue
                raise AssertionError(f"{body!r} was accepted")
        finally:
            await engine.shutdown()

    asyncio.run(main())
