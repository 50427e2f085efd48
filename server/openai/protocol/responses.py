"""`/v1/responses`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import ConfigDict, Field, ValidationError, WithJsonSchema, field_validator

from octavo.core.errors import RequestError
from octavo.core.sampling_params import SamplingParams
from octavo.core.structured_outputs import StructuredOutputsParams
from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.chat import ReasoningEffort, TokenLogprob
from octavo.server.openai.protocol.common import (
    Part,
    Response,
    Unsupported,
    shown,
    validation_error,
)
from octavo.server.openai.protocol.sampling import UNSUPPORTED, SamplingRequest
from octavo.server.openai.protocol.tools import Function, Tool, ToolChoice, check_names, read_choice

STORED = "responses are not stored"
CHAT_ONLY = "only available in /v1/chat/completions"
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"

INPUT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "type": {
                        "enum": ["message", "function_call", "function_call_output", "reasoning"]
                    }
                },
            },
        },
    ]
}
TOOL_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "type": {"const": "function"},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "parameters": {"type": "object"},
            "strict": {"type": "boolean"},
        },
        "required": ["type", "name"],
    },
}
CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
            "required": ["type", "name"],
        },
    ]
}

HIDDEN: Mapping[str, Unsupported] = {
    "n": Unsupported("a response is one answer", (1,)),
    "max_tokens": Unsupported("use max_output_tokens"),
    "prompt_logprobs": Unsupported(CHAT_ONLY),
    "truncate_prompt_tokens": Unsupported(CHAT_ONLY),
    "return_token_ids": Unsupported(CHAT_ONLY, (False,)),
    "return_tokens_as_token_ids": Unsupported(CHAT_ONLY, (False,)),
    "add_special_tokens": Unsupported("the template writes them", (False,)),
    "stream_options": Unsupported("", ({}, {"include_obfuscation": False})),
    "response_format": Unsupported("use text.format"),
}
"""Parameters of the other endpoints that this one does not have."""


def _without_hidden(schema: dict[str, Any]) -> None:
    for name in HIDDEN:
        schema["properties"].pop(name, None)


class TextFormat(Part):
    """As response_format of chats, with the schema's name and the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, description="Of the schema; for the client's own use.")
    description: str | None = Field(default=None, description="Accepted and not used.")
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = Field(
        default=None, description="Accepted: a schema is always kept to, whether strict or not."
    )

    def params(self) -> StructuredOutputsParams | None:
        """What the engine gets. Raises `ApiError`."""
        if (self.type == "json_schema") != (self.schema_ is not None):
            verb = "is missing" if self.schema_ is None else "belongs to type 'json_schema'"
            raise ApiError(
                f"text.format.schema {verb}", param="text.format.schema", code="invalid_value"
            )
        if self.type == "text":
            return None
        wanted = {"json_object": True} if self.schema_ is None else {"json": self.schema_}
        try:
            return StructuredOutputsParams.make(wanted)
        except RequestError as error:
            message = error.message.replace("structured_outputs", "text.format", 1)
            raise ApiError(message, param="text.format", code="invalid_value") from None


class TextConfig(Part):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Part):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())

    effort: ReasoningEffort | None = Field(
        default=None, description="For the template, as its variable reasoning_effort."
    )
    summary: Literal["auto"] | None = Field(
        default=None, description="Reasoning comes whole, in reasoning items, and not summed up."
    )


class ResponsesRequest(SamplingRequest):
    """Body of `POST /v1/responses`."""

    model_config = ConfigDict(json_schema_extra=_without_hidden)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        **HIDDEN,
        "access_programs": Unsupported(),
        "background": Unsupported(STORED, (False,)),
        "background_options": Unsupported(STORED),
        "context_management": Unsupported("", ([],)),
        "conversation": Unsupported(STORED),
        "image": Unsupported("only text output is supported"),
        "max_tool_calls": Unsupported("there are no built-in tools"),
        "moderation": Unsupported(),
        "previous_response_id": Unsupported(f"{STORED}; send the earlier items as input"),
        "prompt": Unsupported(STORED),
        "service_tier": Unsupported("there is only one tier", ("auto", "default")),
        "store": Unsupported(STORED, (False,)),
        "truncation": Unsupported("a prompt that is too long is refused", ("disabled",)),
    }

    renamed: ClassVar[Mapping[str, str]] = {
        "logprobs": "top_logprobs",
        "prompt": "input",
        "messages": "input",
    }

    input: Annotated[Any, WithJsonSchema(INPUT_SCHEMA)] = Field(
        description="A string, or a list of messages, function calls, their outputs, reasoning."
    )
    instructions: str | None = Field(default=None, description="A system message in front.")
    max_output_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum tokens in the answer. Default: the rest of the context.",
    )
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(TOOL_SCHEMA)] = Field(
        default=None, description="Functions that may be called."
    )
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = Field(
        default=None, description="auto (the default with tools), none, required, or a function."
    )
    parallel_tool_calls: bool = Field(
        default=True, description="Whether an answer may have more than one call."
    )
    reasoning: Reasoning | None = Field(
        default=None, description="How much the model should reason: effort."
    )
    text: TextConfig | None = Field(default=None, description="Format of the text.")
    include: list[str] | None = Field(
        default=None,
        description=f"{LOGPROBS}. {ENCRYPTED} is accepted: reasoning items hold their text as it "
        "is, and can be sent back.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description=f"Alternatives beside each token; needs include {LOGPROBS}."
    )
    metadata: dict[str, str] | None = Field(default=None, description="Comes back in the answer.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the template."
    )

    @field_validator("input")
    @classmethod
    def _input(cls, value: Any) -> Any:
        if not isinstance(value, str | list):
            raise ValueError(f"expected a string or an array of items, got {shown(value)}")
        return value

    @field_validator("include")
    @classmethod
    def _include(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in (LOGPROBS, ENCRYPTED):
                raise ValueError(f"{shown(name)} is not supported, only {LOGPROBS}, {ENCRYPTED}")
        return value

    @field_validator("metadata")
    @classmethod
    def _metadata(cls, value: dict[str, str]) -> dict[str, str]:
        if len(value) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in value.items()):
            raise ValueError("expected at most 16 pairs, keys of 64 characters, values of 512")
        return value

    @property
    def template_variables(self) -> dict[str, Any]:
        """For the chat template."""
        effort = self.reasoning.effort if self.reasoning is not None else None
        given = self.chat_template_kwargs or {}
        return given if effort is None else {**given, "reasoning_effort": effort}

    @property
    def token_limit(self) -> int | None:
        return self.max_output_tokens

    @property
    def limit_name(self) -> str:
        return "max_output_tokens"

    @property
    def names(self) -> Mapping[str, str]:
        names = dict(super().names)
        if self.choice.forced:
            names["structured_outputs"] = "tools"
        elif self.structured_outputs is None:
            names["structured_outputs"] = "text.format"
        return names

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        params = super().sampling_params(defaults)
        wanted = self.text.format.params() if self.text and self.text.format else None
        if wanted is None:
            return params
        if params.structured_outputs is not None:
            raise ApiError(
                "text.format and structured_outputs exclude each other",
                param="structured_outputs",
                code="invalid_value",
            )
        return msgspec.structs.replace(params, structured_outputs=wanted)

    def chat_tools(self) -> list[Tool]:
        """The tools in the form of chats. Raises `ApiError`."""
        return [_tool(index, given) for index, given in enumerate(self.tools or ())]

    @property
    def choice(self) -> ToolChoice:
        """The choice among the tools. Raises `ApiError`."""
        return read_choice(self.tool_choice, self.chat_tools())

    def check(self, *, max_n: int, max_logprobs: int) -> None:
        super().check(max_n=max_n, max_logprobs=max_logprobs)
        self._needs(
            self.top_logprobs is None or self.num_logprobs is not None,
            "top_logprobs",
            f"needs {LOGPROBS} in include",
        )
        tools = self.chat_tools()
        check_names(tools, "name")
        read_choice(self.tool_choice, tools)


def _tool(index: int, given: Mapping[str, Any]) -> Tool:
    kind = given.get("type")
    if kind != "function":
        raise ApiError(
            f"tools[{index}]: tools of type {shown(kind)} are not supported, only functions",
            param=f"tools[{index}].type",
            code="unsupported_parameter",
        )
    values = {key: item for key, item in given.items() if key != "type"}
    try:
        return Tool(function=Function.model_validate(values))
    except ValidationError as error:
        wrong = validation_error(error)
        place = f"tools[{index}]"
        raise ApiError(
            f"{place}.{wrong.message}", param=f"{place}.{wrong.param}", code=wrong.code
        ) from None


class OutputText(Response):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[TokenLogprob]


class OutputMessage(Response):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: str
    content: list[OutputText]


class FunctionCallItem(Response):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="A JSON object, as a string.")
    status: str


class ReasoningText(Response):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Response):
    id: str
    type: Literal["reasoning"]
    summary: list[dict[str, Any]]
    content: list[ReasoningText]
    status: str


Item = OutputMessage | FunctionCallItem | ReasoningItem


class InputDetails(Response):
    cached_tokens: int


class OutputDetails(Response):
    reasoning_tokens: int = Field(description="Counted by tokenizing the text of the reasoning.")


class ResponsesUsage(Response):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class FailedBecause(Response):
    code: str
    message: str


class IncompleteBecause(Response):
    reason: Literal["max_output_tokens"]


class ResponsesAnswer(Response):
    """Answer of `POST /v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: FailedBecause | None
    incomplete_details: IncompleteBecause | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponsesUsage | None
    user: str | None


class ResponsesEvent(Response):
    """One event of a stream of `/v1/responses`; what it holds depends on its type, as OpenAI's
    events do."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | None = None
    output_index: int | None = None
    item: Item | None = None
    item_id: str | None = None
    content_index: int | None = None
    part: OutputText | ReasoningText | None = None
    delta: str | None = None
    text: str | None = None
    logprobs: list[TokenLogprob] | None = None
    name: str | None = None
    arguments: str | None = None
