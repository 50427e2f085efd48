"""`Run`: a request in the engine, until it has ended or its client has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from octavo.core.errors import RequestError, RequestFault
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.text.inputs import PreparedRequest
from octavo.server.http.disconnect import cancel
from octavo.server.http.errors import unavailable
from octavo.server.openai.generation import Generation
from octavo.server.openai.protocol.common import Response


async def collect(generation: Generation[Any]) -> Response:
    """The whole answer."""
    choices: dict[tuple[int, int], CompletionOutput] = {}
    async with Run(generation) as run, contextlib.aclosing(run.outputs()) as outputs:
        async for prompt, output in outputs:
            generation.add_prompt(prompt, output)
            for delta in output.outputs:
                known = choices.setdefault((prompt, delta.index), delta)
                if known is not delta:
                    known.extend(delta)
    return generation.answer(dict(sorted(choices.items())))


async def stream(generation: Generation[Any]) -> AsyncGenerator[bytes, None]:
    """Server-sent events of the answer, those of one engine output in one piece."""
    async with Run(generation) as run, contextlib.aclosing(run.outputs()) as outputs:
        async for prompt, output in outputs:
            if events := generation.events(prompt, output):
                yield events
    yield generation.last_events()


class Run:
    """Use as an async context manager: leaving it aborts what still runs."""

    def __init__(self, generation: Generation[Any]) -> None:
        self._generation, self._state = generation, generation.state
        self._live: set[str] = set()
        self._refused = False  # by the engine, before it began

    async def __aenter__(self) -> Run:
        self._state.in_flight += 1
        self._state.metrics.entered(1)
        if self._generation.place is not None:
            self._generation.place.leave()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._state.in_flight -= 1
        self._state.metrics.entered(-1)
        for request_id in list(self._live):
            self._done(request_id)
            await self._state.llm.abort(request_id)

    def _done(self, request_id: str) -> None:
        self._live.discard(request_id)
        self._state.live.discard(request_id)

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Deltas of all prompts as they come, each with its prompt's index. Counts tokens."""
        generation = self._generation
        count = len(generation.prompts)
        merged = self._one(0) if count == 1 else self._merged(count)
        pace = None
        interval = self._state.config.server.stream_interval
        if generation.body.stream and interval > 1:
            pace = Pace(interval)
        async with contextlib.aclosing(merged):
            async for prompt, output in merged:
                if pace is not None:
                    pace.hold_back(prompt, output)
                generation.count(prompt, output)
                yield prompt, output

    async def _merged(self, count: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        queue: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with contextlib.aclosing(self._one(index)) as outputs:
                    async for item in outputs:
                        queue.put_nowait(item)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(index)) for index in range(count)]
        try:
            while count:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    count -= 1
                else:
                    yield item
        finally:
            await cancel(*tasks)

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prepared = self._generation.prompts[index]
        sampling = prepared.sampling
        tally = self._state.metrics.request(
            len(prepared.token_ids), sampling.n, sampling.max_tokens or 0, self._generation.arrived
        )
        with tally:
            if sampling.max_tokens == 0 and sampling.prompt_logprobs is None:
                output = _nothing(prepared)  # needs no engine
                tally.add(output)
                yield index, output
                return
            self._live.add(prepared.request_id)
            self._state.live.add(prepared.request_id)
            try:
                async with contextlib.aclosing(self._state.llm.stream(prepared)) as outputs:
                    async for output in outputs:
                        if output.finished:
                            self._done(prepared.request_id)
                            self._check_interrupted(output)
                        tally.add(output)
                        yield index, output
            except RequestError as error:
                self._refused |= not tally.begun and not isinstance(error, RequestFault)
                raise
            finally:
                tally.refused = self._refused

    def _check_interrupted(self, output: RequestOutput) -> None:
        aborted = any(choice.finish_reason == "abort" for choice in output.outputs)
        if aborted and self._state.draining:
            raise unavailable("the server is stopping; the answer is incomplete", "server_stopping")


def _nothing(prepared: PreparedRequest) -> RequestOutput:
    """The output of a request for no tokens and no logprobs."""
    choices = [
        CompletionOutput(index, "", [], finish_reason="length")
        for index in range(prepared.sampling.n)
    ]
    return RequestOutput(
        prepared.request_id, prepared.prompt, prepared.token_ids, None, choices, finished=True
    )


class Pace:
    """`server.stream_interval`: tokens of each choice are held back until `interval` of them have
    come. The first one, which clients measure, and the last one do not wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], CompletionOutput] = {}
        self._begun: set[tuple[int, int]] = set()

    def hold_back(self, prompt: int, output: RequestOutput) -> None:
        """Leave in this output the choices that are due."""
        due = [self._due(prompt, choice) for choice in output.outputs]
        output.outputs = [choice for choice in due if choice is not None]

    def _due(self, prompt: int, delta: CompletionOutput) -> CompletionOutput | None:
        key = (prompt, delta.index)
        held = self._held.setdefault(key, delta)
        if held is not delta:
            held.extend(delta)
        first = key not in self._begun and bool(held.token_ids)
        if not (first or held.finish_reason or len(held.token_ids) >= self._interval):
            return None
        self._begun.add(key)
        return self._held.pop(key)
