"""Token ids to text, one token at a time.

`TextStream` gives the text of one sequence that may be shown: detokenized, up to a stop string.

`TokenTable` knows, once per tokenizer, the bytes of every token, and whether decoding is nothing
but joining those bytes. It is for byte-level BPE and for byte-fallback vocabularies, and then a
token costs one dictionary lookup and one step of a UTF-8 decoder. For any other tokenizer
(checked, not assumed) a window of recent tokens is decoded twice a token: what the window with
the new token has beyond the window without it is new text.

A byte-fallback decoder turns every byte of a malformed run into U+FFFD even where a part of it is
well formed; a stream cannot know that in advance, so the well-formed part is shown.
"""

from __future__ import annotations

import codecs
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.stops import StopScanner

REPLACEMENT = "\ufffd"
_CONTEXT = 8  # prompt tokens that a window starts with
_LONGEST_HOLD = 16  # tokens that may stay unshown because they end inside a character
_SAMPLES = 512  # tokens looked at to find out whether text is joined bytes

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """Takes the tokens of one sequence one by one and gives the text that may be shown.

    A stop string ends the sequence only with a token after the first `min_tokens`.
    """

    __slots__ = ("_count", "_detokenizer", "_hidden", "_min_tokens", "_scanner", "_table")

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._table = table
        shown = sampling.shown_special_token_ids or ()
        self._hidden = table.hidden_ids(sampling.skip_special_tokens, shown)
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._detokenizer = table.detokenizer(
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            shown=shown,
        )
        self._scanner: StopScanner | None = None
        if sampling.stop:
            self._scanner = StopScanner(
                list(sampling.stop),
                include=sampling.include_stop_str_in_output,
                hidden_texts=[table.token_text(token) for token in self._hidden],
            )

    def feed(self, token_id: int) -> tuple[str, str | None]:
        """Text that this token releases, and the stop string that ends the sequence with it."""
        self._count += 1
        scanner = self._scanner
        if scanner is None:
            return self._detokenizer.feed(token_id), None
        armed = self._count > self._min_tokens
        if token_id in self._hidden:
            return scanner.feed_hidden(self._table.token_text(token_id), armed=armed)
        return scanner.feed(self._detokenizer.feed(token_id), armed=armed)

    def finish(self) -> str:
        """The text that was held back, when the sequence ended without a stop string."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        return self._scanner.feed(rest, armed=False)[0] + self._scanner.flush()


class TokenTable:
    """What each token of a tokenizer stands for, cached. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special_ids = tokenizer.special_ids
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}
        self._joins_bytes: bool | None = None
        self._lock = threading.Lock()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text, maybe half a character."""
        value = self._bytes.get(token_id)
        if value is None:
            value = self._bytes[token_id] = self.tokenizer.token_bytes(token_id)
        return value

    def token_text(self, token_id: int) -> str:
        """The text of one token alone, half a character being U+FFFD."""
        value = self._texts.get(token_id)
        if value is None:
            value = self.token_bytes(token_id).decode("utf-8", "replace")
            self._texts[token_id] = value
        return value

    @property
    def joins_bytes(self) -> bool:
        """Whether the text of tokens is the text of their joined bytes, found out by trying."""
        with self._lock:
            if self._joins_bytes is None:
                self._joins_bytes = self._try_joining()
        return self._joins_bytes

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: Collection[int] = (),
    ) -> Detokenizer:
        """A detokenizer of the tokens that follow this prompt. shown: special tokens that are not
        skipped."""
        hidden = self.hidden_ids(skip_special_tokens, shown)
        if self.joins_bytes:
            return _Joining(self, prompt_token_ids, hidden)
        return _Window(self, prompt_token_ids, hidden, spaces_between_special_tokens)

    def hidden_ids(self, skip_special_tokens: bool, shown: Collection[int] = ()) -> frozenset[int]:
        """Tokens that add nothing to a text."""
        if not skip_special_tokens:
            return frozenset()
        return self.special_ids.difference(shown) if shown else self.special_ids

    def _try_joining(self) -> bool:
        size = self.tokenizer.vocab_size
        sampled = range(0, size, max(1, size // _SAMPLES))
        plain = [i for i in sampled if i not in self.special_ids and self._whole(i)]
        context = next((i for i in plain if self.token_text(i).strip().isalnum()), None)
        if context is None:
            return False
        # Neighbours of unlike kinds: decoders that put or drop spaces do so between tokens.
        half = len(plain) // 2
        mixed = [i for pair in zip(plain[:half], plain[half:], strict=False) for i in pair]
        special = sorted(self.special_ids)[:32]
        return all(
            self._joined(context, ids)
            for ids in (plain, mixed, special, [i for s in special for i in (s, context)])
        )

    def _whole(self, token_id: int) -> bool:
        return REPLACEMENT not in self.token_text(token_id)

    def _joined(self, context: int, ids: list[int]) -> bool:
        ids = [context, *ids]
        data = b"".join(self.token_bytes(i) for i in ids)
        lead = len(self.token_text(context)) - len(self.token_text(context).lstrip())
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        joined = data.decode("utf-8", "replace")
        return text in (joined, joined[lead:])


class Detokenizer(ABC):
    """Text of one sequence. `feed` gives what a token adds, `flush` what was still incomplete."""

    __slots__ = ()

    @abstractmethod
    def feed(self, token_id: int) -> str:
        """Text that is certain now: never half a character."""

    @abstractmethod
    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never completed."""


class _Joining(Detokenizer):
    """Joined bytes through an incremental UTF-8 decoder."""

    __slots__ = ("_at_start", "_decoder", "_hidden", "_table")

    def __init__(self, table: TokenTable, prompt: Sequence[int], hidden: frozenset[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = _new_decoder("replace")
        # A character may begin in the prompt and end in the output.
        tail = [i for i in prompt[-_CONTEXT:] if i not in self._hidden]
        self._decoder.decode(b"".join(table.token_bytes(i) for i in tail))
        self._at_start = not tail and all(i in self._hidden for i in prompt)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        if self._at_start:
            # Nothing is shown before: decoders drop the space that a first word carries.
            self._at_start = False
            if REPLACEMENT not in self._table.token_text(token_id):
                return self._table.tokenizer.decode([token_id], skip_special_tokens=False)
        return self._decoder.decode(self._table.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


class _Window(Detokenizer):
    """Decodes recent tokens with and without the new ones. `_ids[:_read]` is shown already."""

    __slots__ = ("_decode", "_hidden", "_ids", "_known", "_read", "_special", "_table", "_tight")

    def __init__(
        self,
        table: TokenTable,
        prompt: Sequence[int],
        hidden: frozenset[int],
        spaces_between: bool,
    ) -> None:
        self._table = table
        self._special = table.special_ids
        self._hidden = hidden
        self._tight = not spaces_between
        self._ids = [i for i in prompt if i not in self._hidden][-_CONTEXT:]
        self._read = len(self._ids)
        self._known = self._text()

    def _text(self) -> str:
        return self._table.tokenizer.decode(self._ids, skip_special_tokens=False)

    def feed(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        after_special = bool(self._ids) and self._ids[-1] in self._special
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(REPLACEMENT) and len(self._ids) - self._read < _LONGEST_HOLD:
            return ""
        new = self._advance(text)
        if self._tight and after_special and token_id in self._special:
            return new.lstrip(" ")
        return new

    def flush(self) -> str:
        return self._advance(self._text()) if len(self._ids) > self._read else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._known = self._text()
        return new
