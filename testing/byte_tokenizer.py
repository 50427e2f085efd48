"""A tokenizer without files: every byte is a token, and so is every piece that a test names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import RequestError

PIECES = (
    " the",
    " of",
    " and",
    "ing",
    "er",
    " a",
    "é",
    "日本",
    "👍",
    "\n\n",
    "  ",
    " Paris",
    "capital",
)
SPECIAL = ("<|bos|>", "<|end|>", "<|im_start|>", "<|tool|>")


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, then come `pieces`, then `special`; the second special ends a text.

    Greedy: the longest piece that fits is taken, and special tokens are recognised in texts.
    """

    def __init__(
        self, pieces: Sequence[str | bytes] = PIECES, special: Sequence[str] = SPECIAL
    ) -> None:
        plain = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
        self._tokens = [bytes([i]) for i in range(256)] + plain + [s.encode() for s in special]
        self._ids = {token: i for i, token in enumerate(self._tokens)}
        self._longest = max(map(len, self._tokens))
        first = 256 + len(plain)
        self.special_ids = frozenset(range(first, first + len(special)))
        self.bos_token_id: int | None = None
        self.eos_token_ids = (first + 1,)
        self.vocab_size = len(self._tokens)

    def id_of(self, text: str) -> int:
        """The id of one token, by its text."""
        return self._ids[text.encode()]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        data, ids, place = text.encode(), [], 0
        while place < len(data):
            for size in range(min(self._longest, len(data) - place), 0, -1):
                token = self._ids.get(data[place : place + size])
                if token is not None:
                    ids.append(token)
                    place += size
                    break
        return ids

    def fewest_tokens(self, text: str) -> int:
        return len(text) // self._longest

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in hidden)
        return data.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id] if 0 <= token_id < self.vocab_size else b""

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
            raise RequestError(f"this tokenizer renders no template, got {template!r:.40}")
        turns = [f"<|im_start|>{m['role']}\n{_text(m.get('content'))}" for m in messages]
        text = "<|end|>".join(turns)
        if continue_final_message:
            return text
        return text + "<|end|>" + ("<|im_start|>assistant\n" if add_generation_prompt else "")


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""
