"""From a checked request to the engine and back: prompts, limits, and merged outputs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.errors import RequestError, RequestFault
from octavo.core.sampling_params import SamplingParams
from octavo.server.http.disconnect import cancel
from octavo.server.http.errors import ApiError, unavailable
from octavo.server.http.overload import Place
from octavo.server.http.pacing import Pace
from octavo.server.http.state import ServerState
from octavo.server.openai.joined import Joined, MadeOutput
from octavo.server.openai.protocol.common import PromptTokensDetails, Usage
from octavo.server.openai.protocol.sampling import SamplingRequest
from octavo.server.process.engine import Engine, Inputs, Output, closing

MAX_SEQUENCES = 4096
"""Most choices, prompts times n, of one request."""


@dataclass(frozen=True)
class GivenText:
    """A prompt that is to be tokenized."""

    text: str
    add_special_tokens: bool


GivenPrompt = GivenText | list[int]


@dataclass(frozen=True)
class Prompt:
    """text: what the client sent or the template made; None when token ids were sent."""

    token_ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Limits:
    """max_sequence_tokens: what the KV pool holds of one sequence, at most max_model_len."""

    max_model_len: int
    max_sequence_tokens: int
    vocab_size: int

    def exceeded(self, body: SamplingRequest, what: str, total: int) -> ApiError:
        """The refusal of `total` tokens; both numbers are in the message."""
        limit = f"the model's context is {self.max_model_len} tokens (max_model_len)"
        if total <= self.max_model_len:
            limit = f"the KV cache holds {self.max_sequence_tokens} tokens of one sequence"
        return ApiError(f"{what}; {limit}", param=body.prompt_name, code="context_length_exceeded")


@dataclass
class Job:
    """A checked request and its token counts so far. params: one a prompt, max_tokens resolved
    (0: only score the prompt). place: in the queue, until the engine has it. key_name: of the API
    key that the request came with; its user, where the body names none. arrived: when the request
    had been read, by `time.perf_counter`."""

    body: SamplingRequest
    answer_id: str
    model: str
    prompts: list[Prompt] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    arrived: float = field(default_factory=time.perf_counter)
    completion_tokens: int = 0
    cached_tokens: dict[int, int] = field(default_factory=dict)
    place: Place | None = None
    key_name: str | None = None

    def settle(
        self, prompts: Sequence[GivenPrompt], base: SamplingParams, limits: Limits, inputs: Inputs
    ) -> None:
        """Tokenize the prompts; fit them and the limits into the context and the KV pool.

        Raises `ApiError` 400 for a prompt that is empty, too long, or holds ids that the
        vocabulary lacks.
        """
        body = self.body
        if len(prompts) * body.num_choices > MAX_SEQUENCES:
            raise ApiError(
                f"{len(prompts)} prompts with n {body.num_choices}: over {MAX_SEQUENCES} choices",
                param="n",
                code="value_above_maximum",
            )
        texts = [given.text for given in prompts if isinstance(given, GivenText)]
        if body.truncate_prompt_tokens is None:
            for text in texts:
                if least := inputs.fewest_tokens(text):
                    _room(least, body, limits, "at least ")
        for given in prompts:
            prompt = _truncate(_tokenized(given, inputs), body, limits)
            room = _room(len(prompt.token_ids), body, limits)
            _check_ids(prompt.token_ids, body, limits)
            self.prompts.append(prompt)
            self.params.append(_with_limit(base, room, body))

    def count(self, prompt: int, output: Output) -> None:
        """Add an output to the counts."""
        self.completion_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        if output.num_cached_tokens is not None:
            self.cached_tokens[prompt] = output.num_cached_tokens

    def usage(self) -> Usage:
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = PromptTokensDetails(cached_tokens=sum(self.cached_tokens.values()))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=prompt_tokens + self.completion_tokens,
            prompt_tokens_details=cached,
        )


def _tokenized(given: GivenPrompt, inputs: Inputs) -> Prompt:
    if not isinstance(given, GivenText):
        return Prompt(given, None)
    token_ids = inputs.encode(given.text, add_special_tokens=given.add_special_tokens)
    return Prompt(token_ids, given.text)


def _truncate(prompt: Prompt, body: SamplingRequest, limits: Limits) -> Prompt:
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    most = limits.max_model_len
    if keep > most:
        raise ApiError(
            f"truncate_prompt_tokens must be at most max_model_len ({most}), got {keep}",
            param="truncate_prompt_tokens",
            code="value_above_maximum",
        )
    if keep == -1:
        wanted = 1 if body.token_limit is None else body.token_limit
        keep = max(1, limits.max_sequence_tokens - wanted)
    if len(prompt.token_ids) <= keep:
        return prompt
    return Prompt(prompt.token_ids[-keep:], None)


def _check_ids(token_ids: Sequence[int], body: SamplingRequest, limits: Limits) -> None:
    if not token_ids:
        raise ApiError("the prompt must not be empty", param=body.prompt_name, code="invalid_value")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise ApiError(
            f"prompt has token id {wrong}, expected 0 to {limits.vocab_size - 1}",
            param=body.prompt_name,
            code="invalid_value",
        )


def _room(length: int, body: SamplingRequest, limits: Limits, bound: str = "") -> int:
    """max_tokens for a prompt of this length. bound: what stands before the length where it is not
    known exactly."""
    asked, most = body.token_limit, limits.max_sequence_tokens
    if asked is None:
        if length >= most:
            what = f"the prompt has {bound}{length} tokens, and one more must fit"
            raise limits.exceeded(body, what, length + 1)
        return most - length
    if asked == 0 and not getattr(body, "echo", False):
        raise ApiError(
            f"{body.limit_name} must be at least 1, got 0 (0 is allowed with echo)",
            param=body.limit_name,
            code="value_below_minimum",
        )
    if length + asked > most:
        raise limits.exceeded(
            body,
            f"the prompt has {bound}{length} tokens and {body.limit_name} asks for {asked}, "
            f"together {bound}{length + asked}",
            length + asked,
        )
    return asked


def _with_limit(base: SamplingParams, room: int, body: SamplingRequest) -> SamplingParams:
    if base.min_tokens > room:
        raise ApiError(
            f"min_tokens must be at most {body.limit_name} ({room}), got {base.min_tokens}",
            param="min_tokens",
            code="value_above_maximum",
        )
    return msgspec.structs.replace(base, max_tokens=room)


class Run:
    """A job in the engine. Use as an async context manager: leaving it aborts what still runs."""

    def __init__(self, state: ServerState, job: Job) -> None:
        self._llm: Engine = state.llm
        self._state, self._job = state, job
        self._mine: set[str] = set()
        self._refused = False  # by the engine, before it began

    async def __aenter__(self) -> Run:
        self._state.in_flight += 1
        self._state.metrics.entered(1)
        if self._job.place is not None:
            self._job.place.leave()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._state.in_flight -= 1
        self._state.metrics.entered(-1)
        for request_id in list(self._mine):
            self._done(request_id)
            await self._llm.abort(request_id)

    def _done(self, request_id: str) -> None:
        self._mine.discard(request_id)
        self._state.live.discard(request_id)

    async def outputs(self) -> AsyncGenerator[tuple[int, Output], None]:
        """Outputs of all prompts as they come, each with its prompt's index. Counts tokens."""
        count = len(self._job.prompts)
        merged = self._one(0) if count == 1 else self._merged(count)
        interval = self._state.config.server.stream_interval if self._job.body.stream else 1
        pace = Pace(interval)
        async with contextlib.aclosing(merged):
            async for prompt, output in merged:
                due = pace.take(prompt, output)
                self._job.count(prompt, due)
                yield prompt, due

    async def _merged(self, count: int) -> AsyncGenerator[tuple[int, Output], None]:
        queue: asyncio.Queue[tuple[int, Output] | BaseException | None] = asyncio.Queue()

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
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    count -= 1
                else:
                    yield item
        finally:
            await cancel(*tasks)

    async def _one(self, index: int) -> AsyncGenerator[tuple[int, Output], None]:
        prompt, params = self._job.prompts[index], self._job.params[index]
        limit = 0 if params.max_tokens is None else params.max_tokens
        outputs = self._stream(prompt, params) if limit else self._score(prompt, params)
        with self._state.metrics.request(
            len(prompt.token_ids), params.n, limit, self._job.arrived
        ) as tally:
            try:
                async with contextlib.aclosing(outputs):
                    async for output in outputs:
                        tally.add(output)
                        yield index, output
            except RequestError as error:
                self._refused |= not tally.begun and not isinstance(error, RequestFault)
                raise
            finally:
                tally.refused = self._refused

    async def _stream(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Output, None]:
        body = self._job.body
        request_id = self._state.engine_id(self._job.answer_id)
        self._mine.add(request_id)
        self._state.live.add(request_id)
        given: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.text is not None:
            given["prompt"] = prompt.text
        outputs = self._llm.stream(
            given,
            params,
            request_id=request_id,
            priority=body.priority,
            user=self._job.key_name if body.user is None else body.user,
            cache_salt=body.cache_salt,
        )
        async with closing(outputs):
            async for output in outputs:
                if output.finished:
                    self._done(request_id)
                    self._check_interrupted(output)
                yield output

    def _check_interrupted(self, output: Output) -> None:
        aborted = any(choice.finish_reason == "abort" for choice in output.outputs)
        if aborted and self._state.draining:
            raise unavailable("the server is stopping; the answer is incomplete", "server_stopping")

    async def _score(self, prompt: Prompt, params: SamplingParams) -> AsyncGenerator[Output, None]:
        """No tokens are wanted: the engine computes one for the prompt's logprobs, and it is
        dropped."""
        choices = [Joined(index, finish_reason="length") for index in range(params.n)]
        blank = MadeOutput(choices, finished=True)
        if params.prompt_logprobs is None:
            yield blank
            return
        one = msgspec.structs.replace(
            params, n=1, max_tokens=1, min_tokens=0, logprobs=None, structured_outputs=None
        )
        async with contextlib.aclosing(self._stream(prompt, one)) as outputs:
            async for output in outputs:
                if output.prompt_logprobs is not None:
                    blank.prompt_logprobs = output.prompt_logprobs
                if output.num_cached_tokens is not None:
                    blank.num_cached_tokens = output.num_cached_tokens
        yield blank


def hides_last(body: SamplingRequest, finish: str | None, stop: int | str | None) -> bool:
    """Whether the last token ended the answer and is not part of its text."""
    by_token = finish == "stop" and not isinstance(stop, str)
    return by_token and not (body.include_stop_str_in_output and stop is not None)
