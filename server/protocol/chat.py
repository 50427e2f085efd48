"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field, WithJsonSchema, field_validator

from octavo.server.errors import ApiError
from octavo.server.protocol.common import Part, Response, Unsupported, Usage, shown
from octavo.server.protocol.sampling import UNSUPPORTED, SamplingRequest

TOOLS = "tool calls are not built in; tool_choice 'none' shows tools to the template"

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

    @field_validator("content")
    @classmethod
    def _content(cls, value: Any) -> str:
        """Text parts are joined by a line break."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise ValueError(f"expected a string or an array of text parts, got {shown(value)}")
        return "\n".join(_text_part(part) for part in value)

    def for_template(self) -> dict[str, Any]:
        """What a chat template sees."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
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
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="Variables for the template."
    )
    tools: list[dict[str, Any]] | None = Field(
        default=None, description="Shown to the template, with tool_choice 'none'."
    )

    def template_arguments(self) -> dict[str, Any]:
        """Keyword arguments of `render_chat` besides the messages."""
        generation = self.add_generation_prompt
        if self.continue_final_message and generation:
            raise ApiError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
                code="invalid_value",
            )
        return {
            "tools": self.tools or None,
            "add_generation_prompt": not self.continue_final_message
            if generation is None
            else generation,
            "continue_final_message": self.continue_final_message,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


TEMPLATE_UNSUPPORTED: Mapping[str, Unsupported] = {
    "chat_template": Unsupported("a template from a request is not trusted"),
    "documents": Unsupported("", ([],)),
    "mm_processor_kwargs": Unsupported("prompts are text", ({},)),
}


class ChatRequest(TemplateFields, SamplingRequest):
    """Body of `POST /v1/chat/completions`."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = {
        **UNSUPPORTED,
        **TEMPLATE_UNSUPPORTED,
        "functions": Unsupported(TOOLS, ([],)),
        "function_call": Unsupported(TOOLS, ("none",)),
        "echo": Unsupported("it belongs to /v1/completions", (False,)),
        "audio": Unsupported("answers are text"),
        "modalities": Unsupported("answers are text", (["text"],)),
        "prediction": Unsupported(),
        "web_search_options": Unsupported(),
        "reasoning_effort": Unsupported("use chat_template_kwargs if the template knows it"),
        "include_reasoning": Unsupported("reasoning is not split off", (True,)),
        "verbosity": Unsupported("", ("medium",)),
        "service_tier": Unsupported("there is one tier", ("auto", "default")),
        "store": Unsupported("nothing is stored", (False,)),
        "metadata": Unsupported("nothing is stored", ({},)),
        "moderation": Unsupported(),
        "prompt_cache_key": Unsupported("prefixes are cached by content; see cache_salt"),
        "prompt_cache_retention": Unsupported(),
        "safety_identifier": Unsupported("use user"),
    }
    renamed: ClassVar[Mapping[str, str]] = {"logprobs": "top_logprobs"}

    max_completion_tokens: int | None = Field(
        default=None, ge=0, description="OpenAI's newer name of max_tokens; wins over it."
    )
    logprobs: bool = Field(default=False, description="Whether logprobs are sent.")
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Alternatives beside each token; needs logprobs."
    )
    tool_choice: Annotated[Any, WithJsonSchema({"const": "none"})] = Field(
        default=None, description="Only 'none'."
    )
    parallel_tool_calls: bool = Field(
        default=True, description="Accepted: without tool calls there is nothing to run at once."
    )

    @property
    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit

    @property
    def limit_name(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self, *, max_n: int, max_logprobs: int) -> None:
        super().check(max_n=max_n, max_logprobs=max_logprobs)
        self._needs(
            self.logprobs or self.top_logprobs is None, "top_logprobs", "needs logprobs to be true"
        )
        if self.tool_choice not in (None, "none") or (self.tools and self.tool_choice is None):
            param = "tools" if self.tool_choice is None else "tool_choice"
            raise ApiError(
                f"parameter '{param}' is not supported by this server: {TOOLS}",
                param=param,
                code="unsupported_parameter",
            )


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


class ChatMessage(Response):
    role: str
    content: str
    refusal: None


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


class Delta(Response):
    role: str | None = None
    content: str | None = None


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
