"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, WithJsonSchema, field_validator

from octavo.server.http.errors import ApiError
from octavo.server.openai.protocol.common import Part, Response, Unsupported, Usage, shown
from octavo.server.openai.protocol.sampling import UNSUPPORTED, SamplingRequest
from octavo.server.openai.protocol.tools import (
    CHOICE_SCHEMA,
    Tool,
    ToolChoice,
    check_names,
    read_choice,
)

OLD = "use tools and tool_choice"

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's values; what a template makes of one is the model's business."""

CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


class FunctionCall(Part):
    name: str
    arguments: str = Field(default="{}", description="A JSON object, as a string.")

    @field_validator("arguments")
    @classmethod
    def _arguments(cls, value: str) -> str:
        cls._decode(value)
        return value

    @staticmethod
    def _decode(value: str) -> dict[str, Any]:
        try:
            decoded = msgspec.json.decode(value.encode()) if value.strip() else {}
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise ValueError("expected a JSON object as a string, got malformed JSON") from None
        if not isinstance(decoded, dict):
            raise ValueError(f"expected a JSON object as a string, got {shown(value)}")
        return decoded

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": self._decode(self.arguments)}


class ToolCall(Part):
    """A call in the history of a conversation."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.for_template()}


class Message(Part):
    """One message. The template decides which roles it takes."""

    role: str = Field(min_length=1, description="system, user, assistant, tool, ...")
    content: Annotated[Any, WithJsonSchema(CONTENT_SCHEMA)] = Field(
        default="", description="A string or a list of text parts; null is empty text."
    )
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="Another name of reasoning_content.")

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any) -> str | list[dict[str, str]]:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError(f"expected a string or an array of text parts, got {shown(value)}")
        return [{"type": "text", "text": _text_part(part)} for part in value]

    @property
    def text(self) -> str:
        """The content, text parts joined by line breaks."""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part["text"] for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """What a chat template sees."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        values = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message |= {name: value for name, value in values.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _text_part(part: Any) -> str:
    if not isinstance(part, dict):
        raise ValueError(f"expected text parts, got {shown(part)}")
    kind = part.get("type")
    if kind != "text":
        raise ValueError(f"only parts of type 'text' are supported, got {shown(kind)}")
    text = part.get("text")
    if not isinstance(text, str):
        raise ValueError(f"a text part's text must be a string, got {shown(text)}")
    return text


class TemplateFields(Part):
    """How the chat template is rendered; shared with `/tokenize`."""

    messages: list[Message] = Field(min_length=1, description="The conversation.")
    add_generation_prompt: bool | None = Field(
        default=None,
        description="Whether the prompt ends where the assistant's answer starts. Default: true, "
        "or false with continue_final_message.",
    )
    continue_final_message: bool = Field(
        default=False, description="Whether the last message is left open and continued."
    )
    add_special_tokens: bool = Field(
        default=False, description="Whether the tokenizer adds its special tokens once more."
    )
    chat_template: str | None = Field(
        default=None,
        description="A template, or the name of one of the model's, instead of the model's own; "
        "only with server.trust_request_chat_template.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the template."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        default=None,
        description="A variable of this name for the template; one that does not know it takes no "
        "notice.",
    )
    documents: list[dict[str, Any]] | None = Field(
        default=None, description="Documents for a template that has a place for them."
    )
    tools: list[Tool] | None = Field(
        default=None, description="Functions that may be called; shown to the template."
    )

    def template_arguments(self, *, trust_template: bool) -> dict[str, Any]:
        """Keyword arguments of `chat_text` besides the messages. trust_template: whether a
        template may come from the request."""
        generation = self.add_generation_prompt
        if self.continue_final_message and generation:
            raise ApiError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
                code="invalid_value",
            )
        if self.chat_template is not None and not trust_template:
            raise ApiError(
                "parameter 'chat_template' is not supported by this server: a template from a "
                "request is not trusted (server.trust_request_chat_template)",
                param="chat_template",
                code="unsupported_parameter",
            )
        given = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        kwargs = self.chat_template_kwargs or {}
        return {
            "chat_template": self.chat_template,
            "tools": [tool.for_template() for tool in self.tools or ()] or None,
            "add_generation_prompt": not self.continue_final_message
            if generation is None
            else generation,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": kwargs | {k: value for k, value in given.items() if value},
        }


TEMPLATE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "mm_processor_kwargs": Unsupported("prompts are text only", ({},)),
}


class ChatRequest(TemplateFields, SamplingRequest):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        **TEMPLATE_UNSUPPORTED,
        "functions": Unsupported(OLD, ([],)),
        "function_call": Unsupported(OLD, ("none",)),
        "echo": Unsupported("only available in /v1/completions", (False,)),
        "audio": Unsupported("only text output is supported"),
        "modalities": Unsupported("only text output is supported", (["text"],)),
        "prediction": Unsupported(),
        "web_search_options": Unsupported(),
        "verbosity": Unsupported("", ("medium",)),
        "service_tier": Unsupported("there is only one tier", ("auto", "default")),
        "store": Unsupported("responses are not stored", (False,)),
        "moderation": Unsupported(),
    }
    renamed: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs", "prompt": "messages"}

    max_completion_tokens: int | None = Field(
        default=None, ge=0, description="OpenAI's newer name of max_tokens; wins over it."
    )
    logprobs: bool = Field(default=False, description="Return log probabilities.")
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Number of alternatives for each token; needs logprobs."
    )
    tool_choice: Annotated[Any, WithJsonSchema(CHOICE_SCHEMA)] = Field(
        default=None,
        description="auto (the default with tools; needs server.tool_parser to find calls), none, "
        "required, or a function by name.",
    )
    parallel_tool_calls: bool = Field(
        default=True, description="Whether an answer may have more than one call."
    )
    include_reasoning: bool = Field(
        default=True, description="Whether reasoning_content is sent (server.reasoning_parser)."
    )

    @property
    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def choice(self) -> ToolChoice:
        """The choice among the tools. Raises `ApiError`."""
        return read_choice(self.tool_choice, self.tools or ())

    @property
    def names(self) -> Mapping[str, str]:
        forced = {"structured_outputs": "tools"} if self.choice.forced else {}
        return {**super().names, **forced}

    @property
    def continued(self) -> str:
        """The text of the final message, where the answer continues it."""
        return self.messages[-1].text if self.continue_final_message else ""

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, *, max_n: int, max_logprobs: int) -> None:
        super().check(max_n=max_n, max_logprobs=max_logprobs)
        self._needs(
            self.logprobs or self.top_logprobs is None, "top_logprobs", "needs logprobs to be true"
        )
        check_names(self.tools or ())
        read_choice(self.tool_choice, self.tools or ())


class TopLogprob(Response):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Response):
    """bytes joined over all tokens are the content's bytes: a token that is not shown (an end
    token) has none."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Response):
    content: list[TokenLogprob]


class CalledFunction(Response):
    name: str
    arguments: str = Field(description="A JSON object, as a string.")


class MadeToolCall(Response):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Response):
    role: str
    content: str | None = Field(description="Null where the answer has calls and says nothing.")
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] | None = None


class ChatChoice(Response):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(Response):
    """Answer of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    prompt_token_ids: list[int] | None = None


class FunctionDelta(Response):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Response):
    """id, type and name once a call, arguments in pieces."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class Delta(Response):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Response):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChunk(Response):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
