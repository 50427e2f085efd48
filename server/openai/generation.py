"""`Generation`: a client's request, from its checked body to the JSON of its answer."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.frontend.text.inputs import PreparedRequest, Prompt
from octavo.server.http.errors import ApiError
from octavo.server.http.large_body import LARGE, MANY_IDS
from octavo.server.http.overload import Place
from octavo.server.openai.protocol.common import PromptTokensDetails, Response, Usage
from octavo.server.openai.protocol.sampling import SamplingRequest
from octavo.server.openai.state import ServerState

B = TypeVar("B", bound=SamplingRequest)

MAX_SEQUENCES = 4096
"""Most choices, prompts times n, of one request."""

DONE = b"data: [DONE]\n\n"


class Generation(ABC, Generic[B]):
    """One request while it is answered. A subclass for each endpoint says what the engine is asked
    for, and writes what it answers."""

    request: ClassVar[type[SamplingRequest]]
    """Model of the endpoint's body."""
    prefix: ClassVar[str]
    """Of the answer's id."""

    def __init__(
        self,
        state: ServerState,
        body: B,
        *,
        model: str,
        client_id: str | None,
        key_name: str | None,
        arrived: float,
    ) -> None:
        self.state, self.body = state, body
        self.model = model
        self.answer_id = state.answer_id(self.prefix, body.request_id or client_id)
        self.key_name = key_name
        """Name of the API key that the request came with; its user, where the body names none."""
        self.arrived = arrived
        """When the request had been read, by `time.perf_counter`."""
        self.created = int(time.time())
        self.place: Place | None = None
        """In the queue, until the engine has the request."""
        self.prompts: list[PreparedRequest] = []
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt

    # ---- to the engine ---------------------------------------------------------------------------

    @abstractmethod
    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for. Raises `RequestError` and `ApiError`."""

    @abstractmethod
    async def given_prompts(self) -> Sequence[str | list[int]]:
        """Texts, rendered off the event loop, or token ids."""

    @property
    def add_special_tokens(self) -> bool:
        """Whether the tokenizer adds its special tokens to a text."""
        return False

    async def prepare(self) -> None:
        """Check the request and tokenize its prompts, off the event loop where that takes long.
        Raises `RequestError` and `ApiError`."""
        params = self.sampling_params()
        given = await self.given_prompts()
        texts = [len(prompt) for prompt in given if isinstance(prompt, str)]
        many_ids = sum(len(prompt) for prompt in given if isinstance(prompt, list)) > MANY_IDS
        threads = self.state.threads
        if texts:
            large = many_ids or sum(texts) >= LARGE
            await threads.run(large, lambda: self._prepare(given, params))
        else:
            await threads.if_large(many_ids, lambda: self._prepare(given, params))

    def _prepare(self, given: Sequence[str | list[int]], params: SamplingParams) -> None:
        body, inputs = self.body, self.state.llm.inputs
        if len(given) * body.num_choices > MAX_SEQUENCES:
            raise ApiError(
                f"{len(given)} prompts with n {body.num_choices}: over {MAX_SEQUENCES} choices",
                param="n",
                code="value_above_maximum",
            )
        if body.truncate_prompt_tokens is None and len(given) > 1:
            for prompt in given:  # before the first of them is tokenized
                if isinstance(prompt, str):
                    inputs.check_text_length(prompt, params.max_tokens)
        for prompt in given:
            prepared = inputs.prepare(
                self._truncated(prompt),
                params,
                request_id=self.state.engine_id(self.answer_id),
                priority=body.priority,
                user=self.key_name if body.user is None else body.user,
                cache_salt=body.cache_salt,
                add_special_tokens=self.add_special_tokens,
                strict_length=True,
            )
            self.prompts.append(prepared)

    def _truncated(self, prompt: str | list[int]) -> Prompt:
        """The last `truncate_prompt_tokens` of the prompt."""
        keep, inputs = self.body.truncate_prompt_tokens, self.state.llm.inputs
        if keep is None:
            return prompt
        if keep > inputs.max_model_len:
            raise ApiError(
                f"truncate_prompt_tokens must be at most max_model_len ({inputs.max_model_len}), "
                f"got {keep}",
                param="truncate_prompt_tokens",
                code="value_above_maximum",
            )
        if keep == -1:
            wanted = 1 if self.body.token_limit is None else self.body.token_limit
            keep = max(1, inputs.max_sequence_tokens - wanted)
        if isinstance(prompt, list):
            return prompt[-keep:]
        token_ids = inputs.encode(prompt, add_special_tokens=self.add_special_tokens)
        if len(token_ids) > keep:
            return token_ids[-keep:]
        return {"prompt": prompt, "prompt_token_ids": token_ids}

    # ---- from the engine -------------------------------------------------------------------------

    @abstractmethod
    def answer(self, choices: Mapping[tuple[int, int], CompletionOutput]) -> Response:
        """The whole answer; choices by prompt and index, in order."""

    @abstractmethod
    def events(self, prompt: int, output: RequestOutput) -> bytes:
        """The stream's events for one output; there may be none."""

    @abstractmethod
    def last_events(self) -> bytes:
        """Events that end a stream."""

    @abstractmethod
    def error_event(self, error: ApiError) -> bytes:
        """The event that ends a stream that fails."""

    def add_prompt(self, prompt: int, output: RequestOutput) -> None:
        """Note what an output says of the prompt, for `answer`."""

    def count(self, prompt: int, output: RequestOutput) -> None:
        """Count an output's tokens, for `usage`."""
        for choice in output.outputs:
            self._completion_tokens += len(choice.token_ids)
        if output.num_cached_tokens is not None:
            self._cached_tokens[prompt] = output.num_cached_tokens

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = PromptTokensDetails(cached_tokens=sum(self._cached_tokens.values()))
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=prompt_tokens + self._completion_tokens,
            prompt_tokens_details=cached,
        )


class ChunkedGeneration(Generation[B]):
    """Streams as completions and chats do: chunks of data, then [DONE]."""

    @abstractmethod
    def chunks(self, prompt: int, output: RequestOutput) -> Sequence[Any]:
        """The chunks for one output, without usage."""

    @abstractmethod
    def usage_chunk(self, usage: Usage) -> Response:
        """The chunk with usage and no choices."""

    def events(self, prompt: int, output: RequestOutput) -> bytes:
        body, events = self.body, []
        for chunk in self.chunks(prompt, output):
            if body.continuous_usage:
                chunk.usage = self.usage()
            elif body.include_usage:
                chunk.usage = None
            events.append(b"data: " + chunk.encode() + b"\n\n")
        return b"".join(events)

    def last_events(self) -> bytes:
        if not self.body.include_usage:
            return DONE
        return b"data: " + self.usage_chunk(self.usage()).encode() + b"\n\n" + DONE

    def error_event(self, error: ApiError) -> bytes:
        """No [DONE] follows."""
        return f"data: {json.dumps(error.body())}\n\n".encode()

    @staticmethod
    def has_more(choice: CompletionOutput) -> bool:
        """Whether a delta is worth a chunk also without text: a token whose text is held back (for
        a stop string, half a character, or a parser), without logprobs to show, is not."""
        return bool(choice.logprobs or choice.finish_reason)
