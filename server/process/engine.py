"""What the server needs of `AsyncLLM` and of its outputs, as structural types.

The server depends on this much and no more; its tests run against a fake that has only this.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.parsers import AnswerParsers

T = TypeVar("T")


class TokenLogprob(Protocol):
    """One alternative: natural logarithm of its raw probability, rank from 1."""

    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int | None: ...


class Choice(Protocol):
    """What one choice gained since the last output. logprobs: one mapping a token, the chosen one
    among its keys."""

    @property
    def index(self) -> int: ...
    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[Mapping[int, TokenLogprob]] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Output(Protocol):
    """One output of one request. prompt_logprobs: once, in the first output that has it."""

    @property
    def outputs(self) -> Sequence[Choice]: ...
    @property
    def finished(self) -> bool: ...
    @property
    def prompt_logprobs(self) -> Sequence[Mapping[int, TokenLogprob] | None] | None: ...
    @property
    def num_cached_tokens(self) -> int | None: ...


class Inputs(Protocol):
    """The text side's facts and blocking work: call the methods in a thread."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def parsers(self) -> AnswerParsers: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def fewest_tokens(self, text: str) -> int: ...


class Engine(Protocol):
    """The part of `AsyncLLM` that the server calls; facts are there once it has started."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def max_sequence_tokens(self) -> int:
        """The most that the KV pool can hold, at most max_model_len."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def dead_reason(self) -> str | None:
        """Why the engine answers nothing more."""

    @property
    def num_queued(self) -> int:
        """Requests that the engine has not begun."""

    @property
    def num_queued_tokens(self) -> int:
        """Their prompt tokens."""

    async def start(self) -> Any:
        """Load; returns when requests can be answered."""

    async def shutdown(self) -> None:
        """Stop the engine and everything it started."""

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[Output]:
        """Outputs with what is new since the last one. Raises `RequestError` when the request
        fails. Closing it early aborts the request."""

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    async def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """What the chat template makes of a conversation."""

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False while requests run."""

    async def overview(self, cells: int = 1024, requests: int = 32) -> dict[str, Any]:
        """KV blocks, live and recent requests; see docs/metrics.md."""

    async def timeline(self, request_id: str) -> list[dict[str, Any]] | None:
        """What happened to a request; None when nothing was recorded of it."""

    def default_sampling_params(self) -> SamplingParams:
        """What a request that asks for nothing gets."""


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close an asynchronous generator when its reader leaves, as `contextlib.aclosing` does, for
    one that is typed as an iterator."""
    try:
        yield items
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()
