"""Logprobs as the two endpoints write them, and token ids as text."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.frontend.outputs import Logprob
from octavo.server.openai.protocol import chat
from octavo.server.openai.protocol.completions import CompletionLogprobs
from octavo.server.openai.protocol.sampling import SamplingRequest

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot hold."""

Entries = Mapping[int, Logprob]


def label(data: bytes) -> str:
    """A token as text. One that is not UTF-8 by itself becomes `bytes:` and its bytes in hex, so
    that two of them stay apart."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TokenTexts:
    """Bytes and names of token ids. as_ids: name them `token_id:N`. hide_special: special tokens
    are not part of the text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool, hide_special: bool) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids
        self._hidden = tokenizer.special_ids if hide_special else frozenset()

    def raw(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else label(self.raw(token))

    def shown(self, token: int) -> bytes:
        """What the token adds to the text: nothing when it is special and left out."""
        return b"" if token in self._hidden else self.raw(token)


def clamp(value: float) -> float:
    return max(value, MIN_LOGPROB)


def top(entries: Entries, count: int) -> list[tuple[int, float]]:
    """The `count` most probable alternatives with their logprobs, best first."""
    ranked = sorted(entries.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return [(token, clamp(entry.logprob)) for token, entry in ranked[:count]]


def chat_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[Entries],
    count: int,
    texts: TokenTexts,
    *,
    hide_last: bool,
) -> chat.ChatLogprobs:
    """`logprobs` of a chat choice or chunk, `count` alternatives a token. hide_last: the last
    token ended the answer and is not part of the text."""
    content = []
    for position, (token, entries) in enumerate(zip(token_ids, logprobs, strict=True), 1):
        alternatives = [
            chat.TopLogprob(token=texts.name(other), logprob=value, bytes=list(texts.raw(other)))
            for other, value in top(entries, count)
        ]
        hidden = hide_last and position == len(token_ids)
        content.append(
            chat.TokenLogprob(
                token=texts.name(token),
                logprob=clamp(entries[token].logprob),
                bytes=list(b"" if hidden else texts.shown(token)),
                top_logprobs=alternatives,
            )
        )
    return chat.ChatLogprobs(content=content)


class CompletionLogprobsWriter:
    """`logprobs` of one choice of a completion, piece by piece: keeps the text offset.

    Offsets count the characters of the choice's text; all pieces of a character that is spread
    over several tokens have the offset of that character.
    """

    def __init__(self, count: int, texts: TokenTexts) -> None:
        self._count, self._texts = count, texts
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(
        self, token_ids: Sequence[int], logprobs: Sequence[Entries | None]
    ) -> CompletionLogprobs:
        """A null entry (the prompt's first token) has neither logprob nor alternatives. The chosen
        token is among the alternatives even when it is not one of the most probable."""
        texts = self._texts
        offsets: list[int] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        for token, entries in zip(token_ids, logprobs, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(texts.shown(token)))
            if entries is None:
                values.append(None)
                tops.append(None)
                continue
            value = clamp(entries[token].logprob)
            values.append(value)
            best = {texts.name(other): score for other, score in top(entries, self._count)}
            tops.append({texts.name(token): value} | best)
        return CompletionLogprobs(
            tokens=[texts.name(token) for token in token_ids],
            token_logprobs=values,
            top_logprobs=tops,
            text_offset=offsets,
        )


def prompt_logprobs(
    entries: Sequence[Entries | None], tokenizer: Tokenizer
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: token id to logprob, rank and text, one mapping a prompt token."""
    return [
        None
        if position is None
        else {
            str(token): {
                "logprob": clamp(entry.logprob),
                "rank": entry.rank,
                "decoded_token": label(tokenizer.token_bytes(token)),
            }
            for token, entry in position.items()
        }
        for position in entries
    ]


def hides_last(body: SamplingRequest, finish: str | None, stop: int | str | None) -> bool:
    """Whether the last token ended the answer and is not part of its text."""
    by_token = finish == "stop" and not isinstance(stop, str)
    return by_token and not (body.include_stop_str_in_output and stop is not None)
