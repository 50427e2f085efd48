"""`/tokenize` and `/detokenize`, with vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field

from octavo.server.openai.protocol.chat import TEMPLATE_UNSUPPORTED, TemplateFields
from octavo.server.openai.protocol.common import Request, Response, Unsupported


class TokenizeTextRequest(Request):
    """Body of `POST /tokenize` with a prompt."""

    prompt: str = Field(description="The text.")
    add_special_tokens: bool = Field(default=True, description="Whether BOS and such are added.")
    return_token_strs: bool = Field(default=False, description="Adds token_strs.")


class TokenizeChatRequest(TemplateFields, Request):
    """Body of `POST /tokenize` with messages."""

    unsupported: ClassVar[Mapping[str, Unsupported]] = TEMPLATE_UNSUPPORTED

    return_token_strs: bool = Field(default=False, description="Adds token_strs.")


class TokenizeResponse(Response):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Request):
    """Body of `POST /detokenize`."""

    tokens: list[int] = Field(description="Token ids.", json_schema_extra={"minItems": 0})


class DetokenizeResponse(Response):
    prompt: str
