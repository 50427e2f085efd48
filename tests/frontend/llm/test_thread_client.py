"""`ThreadClient`: callers that go away while the engine's thread is about to answer them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from octavo.core.messages import EngineRequest
from octavo.frontend.client import ThreadClient
from octavo.testing.scripted_engine import ScriptedEngine

WAIT = 60


def repeat(request: EngineRequest) -> list[int]:
    return request.token_ids.tolist()


def ignore(_: Any) -> None:
    pass


def test_a_question_whose_asker_has_gone_leaves_the_engine_alone() -> None:
    async def main() -> None:
        deaths: list[str] = []
        client = ThreadClient(lambda: ScriptedEngine(repeat))
        await client.start(ignore, deaths.append)
        busy, go_on = threading.Event(), threading.Event()

        def block(engine: Any) -> None:
            busy.set()
            go_on.wait(WAIT)

        client._inbox.put(block)
        await asyncio.to_thread(busy.wait, WAIT)
        asker = asyncio.ensure_future(asyncio.wrap_future(client.call("metrics")))
        await asyncio.sleep(0)
        asker.cancel()
        await asyncio.wait([asker])
        go_on.set()
        answer = await asyncio.wrap_future(client.call("metrics"))
        assert isinstance(answer, dict)
        assert client.is_alive
        assert not deaths
        await asyncio.to_thread(client.close)

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_a_start_that_is_given_up_still_closes_the_engine() -> None:
    async def main() -> None:
        building, go_on = threading.Event(), threading.Event()
        engine = ScriptedEngine(repeat)

        def build() -> ScriptedEngine:
            building.set()
            go_on.wait(WAIT)
            return engine

        client = ThreadClient(build)
        start = asyncio.ensure_future(client.start(ignore, ignore))
        await asyncio.to_thread(building.wait, WAIT)
        start.cancel()
        await asyncio.wait([start])
        go_on.set()
        await asyncio.to_thread(client.close)
        assert engine.closed

    asyncio.run(asyncio.wait_for(main(), WAIT))
