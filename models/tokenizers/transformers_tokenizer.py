"""Tokenizer `transformers`: AutoTokenizer, for models that have no tokenizer.json.

Importing transformers' tokenizers imports torch and takes seconds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.errors import ModelError
from octavo.models.tokenizers.fast import check_text
from octavo.models.tokenizers.files import (
    begin_token,
    end_tokens,
)
from octavo.models.tokenizers.pieces import Alphabet, alphabet, byte_alphabet, piece_bytes
from octavo.models.tokenizers.templated import TemplatedTokenizer


class TransformersTokenizer(TemplatedTokenizer):
    """Encoding holds a lock: transformers changes its backend's settings on every call."""

    def __init__(self, options: NoOptions, context: TokenizerContext) -> None:
        from transformers import AutoTokenizer

        try:
            inner: Any = AutoTokenizer.from_pretrained(
                str(context.folder), trust_remote_code=context.trust_remote_code
            )
        except Exception as error:  # transformers and remote code raise anything
            raise ModelError(f"{context.folder}: no tokenizer can be made: {error}") from error
        self._inner = inner
        self._lock = threading.Lock()
        tokens = {
            name: text for name, text in inner.special_tokens_map.items() if isinstance(text, str)
        }
        self._set_templates(context, tokens)
        self._added = {int(i): str(t.content) for i, t in inner.added_tokens_decoder.items()}
        self._alphabet = _alphabet(inner)
        self.special_ids = frozenset(inner.all_special_ids) | {
            int(i) for i, token in inner.added_tokens_decoder.items() if token.special
        }
        self.vocab_size = max(inner.get_vocab().values()) + 1
        self.eos_token_ids = end_tokens(context, tokens, inner.convert_tokens_to_ids)
        self.bos_token_id = begin_token(context, tokens, inner.convert_tokens_to_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        with self._lock:
            return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text = self._inner.decode(
            list(token_ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._inner.convert_ids_to_tokens(token_id)
        if isinstance(piece, bytes):
            return piece
        return b"" if piece is None else piece_bytes(piece, self._alphabet)


def _alphabet(inner: Any) -> Alphabet:
    """From the fast backend where there is one, else from the pieces themselves."""
    backend = getattr(inner, "backend_tokenizer", None)
    if backend is not None:
        return alphabet(json.loads(backend.to_str()).get("decoder"))
    pieces = inner.get_vocab()
    if "<0x0A>" in pieces or any("\u2581" in str(piece) for piece in pieces):
        return "sentence_piece"
    return "byte_level" if byte_alphabet().keys() <= pieces.keys() else "plain"
