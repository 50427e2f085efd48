"""What the endpoints that generate share: sampling, streaming, identity of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
from pydantic import Field, field_validator

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.vllm.differences import REQUEST
from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.common import Request, StreamOptions, Unsupported, shown
from octavo.server.openai.protocol.structured import ResponseFormat, structured_outputs

INT32_MAX = 2**31 - 1

ExtraArgument = bool | int | float | str

PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "allowed_token_ids",
    "bad_words",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
"""Fields that go into `SamplingParams` as they are, when the client sent them."""

UNSUPPORTED: Mapping[str, Unsupported] = {
    name: Unsupported(item.instead or item.message, item.request[name])
    for name, item in REQUEST.items()
} | {
    f"guided_{kind}": Unsupported(f"use structured_outputs: {{{kind}: ...}}")
    for kind in ("json", "regex", "choice", "grammar")
}


HINTS = frozenset(
    (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
    )
)
"""Accepted without effect: labels for a provider's own records and caches."""


class SamplingRequest(Request):
    """Parameters of sampling under OpenAI's names, and vLLM's beyond them."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = UNSUPPORTED
    hints: ClassVar[frozenset[str]] = HINTS
    renamed: ClassVar[Mapping[str, str]] = {}

    temperature: float | None = Field(
        default=None,
        json_schema_extra={"minimum": 0, "maximum": 100},
        description="0 is greedy. Default: the model's, or 1.",
    )
    top_p: float | None = Field(
        default=None,
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 1},
        description="Nucleus sampling, in (0, 1].",
    )
    top_k: int | None = Field(
        default=None,
        json_schema_extra={"minimum": -1},
        le=INT32_MAX,
        description="Sample from this many most probable tokens; 0 and -1 mean all.",
    )
    min_p: float | None = Field(
        default=None,
        json_schema_extra={"minimum": 0, "maximum": 1},
        description="Minimum probability relative to the most probable token.",
    )
    n: int | None = Field(default=None, ge=1, description="Choices for every prompt.")
    seed: int | None = Field(
        default=None, description="Up to 64 bits; equal seeds give equal answers."
    )
    stop: str | list[str] | None = Field(
        default=None, description="Texts at which generation stops."
    )
    stop_token_ids: list[int] | None = Field(
        default=None, description="Token ids at which generation stops."
    )
    include_stop_str_in_output: bool = Field(
        default=False, description="Keep the stop text in the answer."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=0,
        description="Maximum number of tokens to generate. Default: as many as fit.",
    )
    min_tokens: int = Field(
        default=0, ge=0, description="Minimum number of tokens before generation may stop."
    )
    presence_penalty: float | None = Field(
        default=None, json_schema_extra={"minimum": -2, "maximum": 2}, description="-2 to 2."
    )
    frequency_penalty: float | None = Field(
        default=None, json_schema_extra={"minimum": -2, "maximum": 2}, description="-2 to 2."
    )
    repetition_penalty: float | None = Field(
        default=None,
        json_schema_extra={"exclusiveMinimum": 0, "maximum": 100},
        description="Greater than 0; 1 is off.",
    )
    logit_bias: dict[str, float] | None = Field(
        default=None, description="Token id (as a string) to a bias of -100 to 100."
    )
    allowed_token_ids: list[int] | None = Field(
        default=None, description="Only these tokens are generated."
    )
    bad_words: list[str] | None = Field(
        default=None, description="Texts that must not be generated."
    )
    vllm_xargs: dict[str, ExtraArgument | list[ExtraArgument]] | None = Field(
        default=None, description="Arguments of plugins' logits processors, by processor name."
    )
    ignore_eos: bool = Field(default=False, description="Continue after end-of-sequence tokens.")
    skip_special_tokens: bool = Field(
        default=True, description="Leave special tokens out of the text."
    )
    spaces_between_special_tokens: bool = Field(
        default=True, description="Accepted for compatibility with vLLM; the tokenizer decides."
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="What the answer must look like, in OpenAI's format."
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="What the answer must look like, as vLLM has it: one of json (a schema), regex,"
        " choice, grammar, json_object and structural_tag; and disable_any_whitespace.",
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives for every prompt token; not while streaming."
    )
    truncate_prompt_tokens: int | None = Field(
        default=None,
        ge=-1,
        description="Keep only this many last tokens of the prompt; -1: as many as fit.",
    )
    stream: bool = Field(default=False, description="Server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    user: str | None = Field(default=None, description="End user, for fair scheduling.")
    priority: int = Field(
        default=0,
        ge=-INT32_MAX,
        le=INT32_MAX,
        description="Lower runs sooner, under scheduler policy `priority`.",
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        description="Cached prefixes are shared only between equal salts.",
    )
    request_id: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        pattern=r"^[!-~]+$",
        description="Becomes part of the answer's id.",
    )
    return_token_ids: bool = Field(
        default=False, description="Adds prompt_token_ids and each choice's token_ids."
    )
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Logprobs name tokens `token_id:N`."
    )

    @field_validator("stop", mode="before")
    @classmethod
    def _stop(cls, value: Any) -> Any:
        if not isinstance(value, str) and not _list_of(value, str):
            raise ValueError(f"expected a string or an array of strings, got {shown(value)}")
        return value

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _truncate(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("expected -1 or at least 1, got 0")
        return value

    @property
    def names(self) -> Mapping[str, str]:
        """The client's names for the engine's parameters, for error messages."""
        names = {**self.renamed, "max_tokens": self.limit_name}
        if self.response_format is not None and not self.structured_outputs:
            names["structured_outputs"] = "response_format"
        return names

    @property
    def include_usage(self) -> bool:
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return self.include_usage and options is not None and options.continuous_usage_stats

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def token_limit(self) -> int | None:
        """max_tokens as the client gave it, under whatever name."""
        return self.max_tokens

    @property
    def limit_name(self) -> str:
        """The name under which the client gave max_tokens."""
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives asked for beside the sampled token; None: no logprobs."""
        return None

    def check(self, *, max_n: int, max_logprobs: int) -> None:
        """Limits of this server, and parameters that exclude each other."""
        if self.num_choices > max_n:
            raise ApiError(
                f"n must be at most {max_n} (server.max_n), got {self.n}",
                param="n",
                code="value_above_maximum",
            )
        if self.token_limit == 0 and not getattr(self, "echo", False):
            raise ApiError(
                f"{self.limit_name} must be at least 1, got 0 (0 is allowed with echo)",
                param=self.limit_name,
                code="value_below_minimum",
            )
        if self.stream_options is not None and self.stream_options.model_fields_set:
            self._needs(self.stream, "stream_options", "is only allowed when stream is true")
        if self.prompt_logprobs is not None:
            self._needs(not self.stream, "prompt_logprobs", "is not available while streaming")
        for name, value in (
            (self.renamed.get("logprobs", "logprobs"), self.num_logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            if value is not None and value > max_logprobs:
                raise ApiError(
                    f"{name} must be at most {max_logprobs} (server.max_logprobs), got {value}",
                    param=name,
                    code="value_above_maximum",
                )

    def _needs(self, condition: bool, param: str, what: str) -> None:
        if not condition:
            raise ApiError(f"{param} {what}", param=param, code="invalid_value")

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """What the engine is asked for. Raises `RequestError` for values out of range."""
        values = msgspec.structs.asdict(defaults)
        values |= {name: getattr(self, name) for name in PLAIN if name in self.model_fields_set}
        values["max_tokens"] = self.token_limit
        values["logprobs"] = self.num_logprobs
        values["prompt_logprobs"] = self.prompt_logprobs
        if self.vllm_xargs:
            values["extra_args"] = self.vllm_xargs
        if self.logit_bias is not None:
            values["logit_bias"] = {_token_id(key): bias for key, bias in self.logit_bias.items()}
        values["structured_outputs"] = structured_outputs(
            self.response_format, self.structured_outputs
        )
        return SamplingParams(**values)


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(
            f"logit_bias must have token ids as keys, got {shown(key)}",
            param="logit_bias",
            code="invalid_value",
        )
    return int(key)


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)
