"""Tokenizer `fast`: tokenizer.json through the `tokenizers` library. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer as Backend

from octavo.core.contracts import NoOptions
from octavo.core.contracts.tokenizer import TokenizerContext
from octavo.core.errors import ModelError, RequestError
from octavo.models.tokenizers.fewest import FewestTokens, fewest_tokens
from octavo.models.tokenizers.files import (
    TOKENIZER_JSON,
    begin_token,
    end_tokens,
    special_tokens,
)
from octavo.models.tokenizers.pieces import alphabet, piece_bytes
from octavo.models.tokenizers.templated import TemplatedTokenizer

_SHORT = 2048  # characters that are tokenized in less time than another thread notices


class FastTokenizer(TemplatedTokenizer):
    """The backend is never changed after `__init__`, so that threads may share it. Decoding does
    not tidy spaces before punctuation (`clean_up_tokenization_spaces`), which would make a text
    depend on what follows it."""

    def __init__(self, options: NoOptions, context: TokenizerContext) -> None:
        file = context.folder / TOKENIZER_JSON
        try:
            text = file.read_text(encoding="utf-8")
            self._backend = Backend.from_str(text)
            spec = json.loads(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{file}: cannot be read as a tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        tokens = special_tokens(context.folder)
        self._set_templates(context, tokens)
        self._alphabet = alphabet(spec.get("decoder"))
        model = spec["model"].items()
        self._spec = spec | {"model": dict(i for i in model if i[0] not in ("vocab", "merges"))}
        self._added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_token_ids = end_tokens(context, tokens, self._backend.token_to_id)
        self.bos_token_id = begin_token(context, tokens, self._backend.token_to_id)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        check_text(text)
        if len(text) <= _SHORT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:
            # Unlike `encode`, this lets other threads run, and computes no offsets.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        return 0 if self._fewest is None else self._fewest(text)

    @cached_property
    def _fewest(self) -> FewestTokens | None:
        normalizer = self._backend.normalizer
        contents = [str(token.content) for token in self._added.values()]
        return fewest_tokens(
            self._spec,
            self._backend.get_vocab(with_added_tokens=False),
            map(normalizer.normalize_str, contents) if normalizer is not None else (),
        )

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode()
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else piece_bytes(piece, self._alphabet)


def check_text(text: str) -> None:
    """`RequestError` for half a surrogate pair, which JSON can carry and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text has a lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; expected valid Unicode",
            param="prompt",
        ) from error
