"""Tokenizer `example`: every byte of UTF-8 is a token, and three special tokens mark a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts import Options
from octavo.core.contracts.tokenizer import Tokenizer, TokenizerContext
from octavo.core.errors import RequestError

SPECIAL = ("<|begin|>", "<|role|>", "<|end|>")


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, then come the special tokens. Holds no state, so any thread may
    call."""

    def __init__(self, options: ExampleOptions, context: TokenizerContext) -> None:
        self.vocab_size = 256 + len(SPECIAL)
        self.bos_token_id = 256
        self.eos_token_ids = (258,)
        self.special_ids = frozenset(range(256, self.vocab_size))
        self._pattern = re.compile("|".join(map(re.escape, SPECIAL)))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [256] if add_special_tokens else []
        place = 0
        try:
            for match in self._pattern.finditer(text):
                ids += text[place : match.start()].encode()
                ids.append(256 + SPECIAL.index(match.group()))
                place = match.end()
            ids += text[place:].encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is no Unicode: {error}", param="prompt") from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset[int]()
        data = b"".join(self.token_bytes(token) for token in token_ids if token not in hidden)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes([token_id])
        return SPECIAL[token_id - 256].encode() if token_id in self.special_ids else b""

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
        if template is not None:
            raise RequestError("this tokenizer renders no templates", param="chat_template")
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        text = SPECIAL[0]
        for index, message in enumerate(messages):
            text += f"{SPECIAL[1]}{self._role(index, message)}\n{self._content(index, message)}"
            if index < len(messages) - 1 or not continue_final_message:
                text += SPECIAL[2]
        if add_generation_prompt and not continue_final_message:
            text += f"{SPECIAL[1]}assistant\n"
        return text

    @staticmethod
    def _role(index: int, message: Any) -> str:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}] must be a mapping with a 'role'", param="messages"
            )
        return str(message["role"])

    @staticmethod
    def _content(index: int, message: Mapping[str, Any]) -> str:
        content = message.get("content")
        if content is None:
            return ""
        if isinstance(content, str):
            return content
        if isinstance(content, list) and all(isinstance(part, Mapping) for part in content):
            return "\n".join(str(part.get("text", "")) for part in content)
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts", param="messages"
        )
