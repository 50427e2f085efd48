"""Requests to a server that speaks the OpenAI protocol, streamed, and a whole workload of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from octavo.bench.load.answers import Answer
from octavo.bench.load.http import HttpClient, HttpError
from octavo.bench.workloads.calls import Call, Dispatcher
from octavo.core.errors import ConfigError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
VOCABULARIES = (100_000, 32_000, 8_192, 1_024, 256, 64)
"""Sizes that are tried when nobody says how many token ids a server knows."""

_TAKEN = (400, 404, 405, 422)
"""Answers of a server that is ready, and does not serve what it was asked."""


@dataclass
class Target:
    """A server, and how to ask it. tokens: prompts are sent as token ids where a call has them,
    else as text. extra: further keys of the body."""

    client: HttpClient
    model: str
    path: str = COMPLETIONS
    tokens: bool = True
    temperature: float | None = 0.0
    ignore_eos: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)

    def request(self, call: Call) -> tuple[str, dict[str, Any]]:
        """Path and body of a call."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": call.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        if call.user is not None:
            body["user"] = call.user
        if call.priority:
            body["priority"] = call.priority
        path = self.path if call.messages is None else CHAT
        if path.endswith("/chat/completions"):
            messages = call.messages or ({"role": "user", "content": call.as_text},)
            body["messages"] = list(messages)
        elif self.tokens and call.token_ids is not None:
            body["prompt"] = list(call.token_ids)
        else:
            body["prompt"] = call.as_text
        return path, {**body, **self.extra}


async def served_model(client: HttpClient) -> str:
    """The first name that a server lists."""
    models = await client.json("GET", "/v1/models")
    try:
        return str(models["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise HttpError(f"{client.url}/v1/models lists no models; pass --model") from None


async def probe_vocabulary(client: HttpClient, model: str) -> int | None:
    """How many token ids may be used in prompts; None for a server that takes text only."""
    for size in VOCABULARIES:
        body = {"model": model, "prompt": [1, size - 1], "max_tokens": 1, "temperature": 0}
        try:
            await client.json("POST", COMPLETIONS, body)
        except HttpError as error:
            if error.status not in _TAKEN:
                raise
            continue
        return size
    return None


async def wait_ready(client: HttpClient, seconds: float) -> tuple[str, str]:
    """Until the server generates a token: its model's name, and the path to ask it at (chat, where
    it has no completions). Raises `ConfigError` when it does not in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            model = await served_model(client)
            return model, await _generating_path(client, model)
        except HttpError as error:
            if time.monotonic() >= deadline or error.status in (401, 403, 404):
                raise ConfigError(f"{client.url} does not answer: {error}") from None
        await asyncio.sleep(0.2)


async def _generating_path(client: HttpClient, model: str) -> str:
    """Where a server generates; raises `HttpError` when it does not yet."""
    try:
        await client.json("POST", COMPLETIONS, {"model": model, "prompt": "Hello", "max_tokens": 1})
    except HttpError as error:
        if error.status not in _TAKEN:
            raise
        return CHAT if error.status in (404, 405) else COMPLETIONS
    return COMPLETIONS


async def ask(
    target: Target,
    call: Call,
    answer: Answer,
    clock: Callable[[], float],
    on_tokens: Callable[[int], object] = lambda count: None,
) -> None:
    """Send one call and fill in its answer. A request that fails is an answer with an error."""
    path, body = target.request(call)
    texts: list[str] = []
    try:
        async with aclosing(target.client.events(path, body)) as events:
            async for data in events:
                now, event = clock(), json.loads(data)
                text = _take(answer, event)
                if text:
                    texts.append(text)
                    answer.times.append(now)
                    answer.counts.append(1)
                    on_tokens(1)
    except (HttpError, ValueError, TimeoutError) as error:
        answer.error = str(error) or type(error).__name__
    answer.ended = clock()
    answer.text = "".join(texts)
    if answer.error is None and not answer.times:
        answer.error = "the answer has no text"
    _settle_counts(answer)


def _take(answer: Answer, event: Mapping[str, Any]) -> str:
    """Note what an event says; the text that it brings."""
    if event.get("error"):
        error = event["error"]
        raise HttpError(str(error.get("message", error) if isinstance(error, dict) else error))
    if event.get("usage"):
        _count(answer, event["usage"])
    texts = []
    for choice in event.get("choices") or ():
        answer.finish = choice.get("finish_reason") or answer.finish
        delta = choice.get("delta") or choice
        names = ("text", "content", "reasoning_content", "reasoning")
        texts.append(next((delta[name] for name in names if delta.get(name)), ""))
    return "".join(texts)


def _count(answer: Answer, usage: Mapping[str, Any]) -> None:
    answer.num_prompt = int(usage.get("prompt_tokens") or 0)
    answer.num_output = int(usage.get("completion_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    answer.num_cached = int(details.get("cached_tokens") or 0)


def _settle_counts(answer: Answer) -> None:
    """Tokens that no event of their own brought (half a character, merged events) came with the
    events there were; only the sum is known, so they are spread evenly."""
    if not answer.num_output:
        answer.num_output = sum(answer.counts)
    elif answer.counts:
        each, more = divmod(answer.num_output, len(answer.counts))
        answer.counts = [each + (place < more) for place in range(len(answer.counts))]


async def run_calls(
    target: Target,
    calls: Sequence[Call],
    max_concurrency: int | None = None,
    on_tokens: Callable[[int], object] = lambda count: None,
    on_end: Callable[[Answer], object] = lambda answer: None,
) -> tuple[list[Answer], float]:
    """Send every call when it is due: the answers in order, and the seconds it took."""
    answers = [Answer(0.0) for _ in calls]
    dispatcher = Dispatcher(calls, max_concurrency)
    woken = asyncio.Event()
    begin = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - begin

    async def one(index: int) -> None:
        answer = answers[index]
        await ask(target, calls[index], answer, clock, on_tokens)
        dispatcher.ended(index, clock())
        on_end(answer)
        woken.set()

    async with asyncio.TaskGroup() as tasks:
        while not dispatcher.done:
            now = clock()
            for index in dispatcher.due(now):
                answers[index].sent = now
                tasks.create_task(one(index))
            woken.clear()
            until = dispatcher.next_time()
            pause = None if until is None else max(0.0, until - clock())
            try:
                async with asyncio.timeout(pause):
                    await woken.wait()
            except TimeoutError:
                continue
    return answers, clock()
