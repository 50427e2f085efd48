"""Conversations to prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import RequestError
from octavo.frontend.text.inputs import InputProcessor

Conversation = Sequence[Mapping[str, Any]]
"""Messages in OpenAI's form: `{"role": ..., "content": ...}`."""


def render_chat(inputs: InputProcessor, messages: Conversation, **keywords: Any) -> dict[str, Any]:
    """A prompt (`prompt` and `prompt_token_ids`) from a conversation. keywords: of `chat_text`.
    The template writes the special tokens itself. Raises `RequestError` and `RequestTooLong`."""
    return chat_prompt(inputs, chat_text(inputs.tokenizer, messages, **keywords))


def chat_prompt(inputs: InputProcessor, text: str) -> dict[str, Any]:
    """A prompt from what the template made. Raises `RequestTooLong`."""
    return {
        "prompt": text,
        "prompt_token_ids": inputs.encode_prompt(text, add_special_tokens=False),
    }


def chat_text(
    tokenizer: Tokenizer,
    messages: Conversation,
    *,
    template: str | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that the template makes of a conversation. add_generation_prompt: by default where
    no message is continued. Raises `RequestError`."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list of at least one message", param="messages")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{place}] must be a mapping with a 'role', got {message!r:.80}",
                param="messages",
            )
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message exclude each other",
            param="continue_final_message",
        )
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final_message
    return tokenizer.chat(
        messages,
        tools=tools,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        template=template,
        kwargs=kwargs,
    )
