"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, WithJsonSchema, field_validator

from octavo.core.sampling_params import SamplingParams
from octavo.server.openai.protocol.common import Response, Unsupported, Usage, shown
from octavo.server.openai.protocol.sampling import UNSUPPORTED, SamplingRequest

MAX_PROMPTS = 2048
"""Most prompts in one request, OpenAI's limit."""

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {**_IDS, "minItems": 1},
        {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
    ]
}


CHAT = "only available in /v1/chat/completions"


class CompletionRequest(SamplingRequest):
    """Body of `POST /v1/completions`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        "suffix": Unsupported("fill-in-the-middle is not supported", ("",)),
        "max_completion_tokens": Unsupported("use max_tokens"),
        "top_logprobs": Unsupported("use logprobs"),
        "messages": Unsupported(CHAT),
        "tools": Unsupported(CHAT, ([],)),
        "tool_choice": Unsupported(CHAT, ("none", "auto")),
        "parallel_tool_calls": Unsupported(CHAT, (True, False)),
    }

    prompt: Annotated[Any, WithJsonSchema(PROMPT_SCHEMA)] = Field(
        description="A string, a list of strings, token ids, or a list of lists of token ids."
    )
    echo: bool = Field(default=False, description="Whether the answer starts with the prompt.")
    logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives beside each token; 0: only the token."
    )
    add_special_tokens: bool = Field(
        default=True, description="Whether the tokenizer adds its special tokens (BOS)."
    )

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        as_prompts(value)
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling_params(defaults)
        if self.echo and self.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = self.logprobs
        return params


def as_prompts(value: Any) -> list[str | list[int]]:
    """The prompts in one of the four forms; raises ValueError that says what is wrong."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise ValueError(
            "expected a string, an array of strings, an array of token ids, or an array of "
            f"arrays of token ids, got {shown(value)}"
        )
    if not value:
        raise ValueError("must not be empty")
    if type(value[0]) is int:
        value = [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts are accepted, got {len(value)}")
    for index, prompt in enumerate(value):
        _check_prompt(index, prompt, type(value[0]))
    return list(value)


def _check_prompt(index: int, prompt: Any, kind: type[Any]) -> None:
    if type(prompt) is not kind or kind not in (str, list):
        raise ValueError(f"prompt {index} must be like the first one, got {shown(prompt)}")
    if not prompt:
        raise ValueError(f"prompt {index} must not be empty")
    if kind is list:
        for token in prompt:
            if type(token) is not int:
                raise ValueError(f"prompt {index} must hold token ids, got {shown(token)}")


class CompletionLogprobs(Response):
    """Parallel lists, one item a token. A token that is not valid UTF-8 by itself is written
    `bytes:\\xf0\\x9f`. text_offset counts characters from the start of the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Response):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None


class CompletionResponse(Response):
    """Answer of `POST /v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
