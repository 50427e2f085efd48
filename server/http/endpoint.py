"""What `/v1/completions` and `/v1/chat/completions` do alike: check, run, answer or stream."""

from __future__ import annotations

import contextlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response as HTTPResponse

from octavo.core.sampling_params import SamplingParams
from octavo.server.http.body import parsed, read_body
from octavo.server.http.disconnect import EventStream, until_gone
from octavo.server.http.errors import ApiError, from_exception
from octavo.server.http.large_body import LARGE, MANY_IDS
from octavo.server.http.request_log import log_request
from octavo.server.http.state import ServerState
from octavo.server.openai.generation import GivenPrompt, GivenText, Job, Limits, Run
from octavo.server.openai.joined import Joined
from octavo.server.openai.protocol.common import Response, Usage, parse
from octavo.server.openai.protocol.sampling import SamplingRequest
from octavo.server.process.engine import Choice, Output

B = TypeVar("B", bound=SamplingRequest)

DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """How an endpoint writes a job's outputs. One a job; keeps what spans several outputs."""

    def events(self, prompt: int, output: Output) -> bytes:
        """The stream's events for one output; there may be none."""

    def last_events(self) -> bytes:
        """Those that end a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """The one that ends a stream that goes wrong."""

    def answer(self, choices: Mapping[tuple[int, int], Choice], usage: Usage) -> Response:
        """The whole answer; choices by prompt and index."""

    def add_prompt(self, prompt: int, output: Output) -> None:
        """Note the prompt's logprobs, for `answer`."""


class DataEvents(ABC):
    """A writer's events as completions and chats have them: chunks of data, then [DONE]."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @abstractmethod
    def chunks(self, prompt: int, output: Output) -> Sequence[Response]:
        """The chunks for one output, without usage."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Response:
        """The chunk with usage and no choices."""

    def events(self, prompt: int, output: Output) -> bytes:
        body, events = self._job.body, []
        for chunk in self.chunks(prompt, output):
            if body.continuous_usage:
                chunk.usage = self._job.usage()  # type: ignore[attr-defined]
            elif body.include_usage:
                chunk.usage = None  # type: ignore[attr-defined]
            events.append(b"data: " + chunk.encode() + b"\n\n")
        return b"".join(events)

    def last_events(self) -> bytes:
        if not self._job.body.include_usage:
            return DONE
        return b"data: " + self.usage_chunk(self._job.usage()).encode() + b"\n\n" + DONE

    def error_event(self, error: ApiError) -> bytes:
        """No [DONE] follows."""
        return f"data: {json.dumps(error.body())}\n\n".encode()


class Endpoint(Protocol[B]):
    """One of the endpoints that generate."""

    request: type[B]
    prefix: str

    def params(self, state: ServerState, body: B) -> SamplingParams:
        """What the engine is asked for, but for max_tokens."""

    async def prompts(self, state: ServerState, body: B) -> list[GivenPrompt]:
        """Texts, rendered off the event loop, or token ids."""

    def writer(self, state: ServerState, job: Job) -> Writer: ...


class Handler(Generic[B]):
    """An ASGI endpoint function's worth of work for one request at a time."""

    def __init__(self, endpoint: Endpoint[B]) -> None:
        self._endpoint = endpoint

    async def handle(self, request: Request) -> HTTPResponse:
        """Answer one request."""
        state: ServerState = request.app.state.server
        config = state.config.server
        data = await read_body(request, config.max_body_bytes)
        arrived = time.perf_counter()
        kind, refuse = self._endpoint.request, config.unknown_parameters == "refuse"
        body, ignored = await parsed(
            state.threads, data, lambda found: parse(kind, found, refuse_unknown=refuse)
        )
        state.warn_ignored(ignored)
        headers = {"x-octavo-ignored-parameters": names_header(ignored)} if ignored else {}
        model = state.model_name(body.model)
        body.check(max_n=config.max_n, max_logprobs=config.max_logprobs)
        state.require_ready()
        place = state.queue.enter()
        try:
            preparing = self._job(state, body, model, header_id(request))
            job = await until_gone(request.receive, preparing)
            job.place, job.arrived = place, arrived
            job.key_name = getattr(request.state, "api_key_name", None)
            place.settle([len(prompt.token_ids) for prompt in job.prompts])
            log_request(state.config.observability, job)
            headers["x-request-id"] = job.answer_id
            return await self._answer(request, state, job, headers)
        except ClientDisconnect:
            raise
        except Exception as error:
            raise from_exception(error, body.names) from error
        finally:
            place.leave()

    async def _job(self, state: ServerState, body: B, model: str, asked_id: str | None) -> Job:
        params = self._endpoint.params(state, body)
        given = await self._endpoint.prompts(state, body)
        answer_id = state.answer_id(self._endpoint.prefix, body.request_id or asked_id)
        job = Job(body, answer_id, model)
        llm = state.llm
        limits = Limits(llm.max_model_len, llm.max_sequence_tokens, llm.inputs.vocab_size)
        texts = [len(each.text) for each in given if isinstance(each, GivenText)]
        many_ids = sum(len(each) for each in given if isinstance(each, list)) > MANY_IDS

        def settle() -> None:
            job.settle(given, params, limits, llm.inputs)

        if texts:
            await state.threads.run(many_ids or sum(texts) >= LARGE, settle)
        else:
            await state.threads.if_large(many_ids, settle)
        return job

    async def _answer(
        self, request: Request, state: ServerState, job: Job, headers: Mapping[str, str]
    ) -> HTTPResponse:
        writer = self._endpoint.writer(state, job)
        if not job.body.stream:
            answer = await until_gone(request.receive, collect(state, job, writer))
            return HTTPResponse(answer.encode(), media_type="application/json", headers=headers)
        events = stream(state, job, writer)
        try:
            first = await until_gone(request.receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(first, guarded(events, writer, job.body.names), headers)


async def collect(state: ServerState, job: Job, writer: Writer) -> Response:
    """The whole answer."""
    choices: dict[tuple[int, int], Joined] = {}
    async with Run(state, job) as run, contextlib.aclosing(run.outputs()) as outputs:
        async for prompt, output in outputs:
            writer.add_prompt(prompt, output)
            for choice in output.outputs:
                joined = choices.setdefault((prompt, choice.index), Joined(choice.index))
                joined.add(choice)
    return writer.answer(dict(sorted(choices.items())), job.usage())


async def stream(state: ServerState, job: Job, writer: Writer) -> AsyncGenerator[bytes, None]:
    """Server-sent events of the answer, those of one engine output in one piece."""
    async with Run(state, job) as run, contextlib.aclosing(run.outputs()) as outputs:
        async for prompt, output in outputs:
            if events := writer.events(prompt, output):
                yield events
    yield writer.last_events()


async def guarded(
    events: AsyncGenerator[bytes, None], writer: Writer, renamed: Mapping[str, str]
) -> AsyncGenerator[bytes, None]:
    """An error after the stream has begun becomes an error event, the last one."""
    async with contextlib.aclosing(events):
        try:
            async for piece in events:
                yield piece
        except Exception as error:
            yield writer.error_event(from_exception(error, renamed))


def header_id(request: Request) -> str | None:
    """The client's name for the request in `x-request-id`, if it is fit for one."""
    value = request.headers.get("x-request-id", "")
    fit = 0 < len(value) <= 256 and value.isascii() and value.isprintable() and " " not in value
    return value if fit else None


def names_header(names: Sequence[str]) -> str:
    """Names that a client sent, safe in a header: as many whole ones as fit."""
    plain = [name for name in names if name.isascii() and name.isidentifier() and len(name) <= 100]
    text = ", ".join(plain)
    if len(text) > 1000:
        text = text[:1000].rpartition(", ")[0] + ", ..."
    return text or "?"


def has_more(choice: Choice) -> bool:
    """Whether a delta is worth an event also without text: a token whose text is held back (for a
    stop string, half a character, or a parser), without logprobs to show, is not."""
    return bool(choice.logprobs or choice.finish_reason)
