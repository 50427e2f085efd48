"""What the server needs of `AsyncLLM` and of its outputs, as structural types.

The server depends on this much and no more; its tests run against a fake that has only this.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.sampling_params import SamplingParams


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
    @property
    def error(self) -> str | None: ...


class Engine(Protocol):
    """The part of `AsyncLLM` that the server calls."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...

    async def start(self) -> None:
        """Load; returns when requests can be answered."""

    async def shutdown(self) -> None:
        """Stop the engine and everything it started."""

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Outputs with what is new since the last one. Closing it early aborts the request."""

    async def abort(self, request_id: str) -> None:
        """End a request; unknown ids are ignored."""

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], **kwargs: Any
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation. Blocks: call it in a thread."""

    def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Blocks: call it in a thread."""

    def check_health(self) -> None:
        """Raises `EngineDeadError` when the engine has stopped."""

    def default_sampling_params(self) -> SamplingParams:
        """What a request that asks for nothing gets."""
