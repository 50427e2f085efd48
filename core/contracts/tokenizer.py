"""Kind `tokenizer`: text to token ids and back, and the chat template.

Runs in the API process (and in `LLM`), possibly on several threads at once; must not import torch
unless that cannot be avoided (and then says so in its summary).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.contracts.provider import Provider, hookspec


@dataclass(frozen=True)
class TokenizerContext:
    """What a factory gets."""

    folder: Path  # tokenizer files
    config: dict[str, Any]  # of the model, as the next one, for end tokens
    generation_config: dict[str, Any]
    trust_remote_code: bool = False
    chat_template: str | None = None  # overrides the model's own
    # A message's content in the template: `string`, `openai` (a list of parts) or `auto`.
    content_format: str = "auto"


@dataclass(frozen=True)
class ChatSource:
    """How another process renders chats as `Tokenizer.chat` does."""

    factory: str  # import string; returns an object whose `render` takes what `chat` takes
    arguments: dict[str, Any]  # of the factory, plain data


class Tokenizer(ABC):
    """Thread-safe."""

    eos_token_ids: tuple[int, ...]  # of tokenizer, config and generation config
    bos_token_id: int | None
    vocab_size: int  # largest id + 1
    special_ids: frozenset[int]  # hidden by `skip_special_tokens`

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, special tokens that `encode` adds left out,
        found in a small part of the time that `encode` takes: a text far too long is refused
        without being tokenized. 0: nothing is known."""
        return 0

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD, ids that no token has are left
        out."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for inside a text (a byte-level piece may be half a
        character); a special token's own text; b"" for an id that no token has."""

    @abstractmethod
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render the chat template. The text already holds the special tokens it wants: encode it
        with add_special_tokens=False. Raises `RequestError` with the template's own message."""

    def chat_source(self) -> ChatSource | None:
        """For rendering chats in a process that can be killed, which a server does. None: `chat`
        is called in a thread."""
        return None

    # ---- under the names of transformers' tokenizers, for scripts that expect one ----------------

    @property
    def eos_token_id(self) -> int | None:
        """The first end token."""
        return self.eos_token_ids[0] if self.eos_token_ids else None

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`input_ids` and `attention_mask` of one text."""
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": token_ids, "attention_mask": [1] * len(token_ids)}

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> str | list[int]:
        """`chat` as transformers names it: token ids, or the text with `tokenize=False`; further
        keywords go to the template."""
        text = self.chat(
            conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template=chat_template,
            kwargs=kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


class Spec:
    @hookspec
    def octavo_tokenizers(self) -> list[Provider[Tokenizer]]:  # type: ignore[empty-body]
        """Providers of tokenizers. A probe reads the fact `tokenizer_dir`.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `TokenizerContext`.
        """
