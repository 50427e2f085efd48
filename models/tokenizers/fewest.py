"""How many tokens a text has at least, without tokenizing it.

No token stands for more than the longest piece of the vocabulary. Pieces of letters and digits are
far shorter than runs of spaces or dashes are, so the two are counted apart. All this holds only
for a tokenizer that loses no character on the way: what is not known to be of that kind has no
bound.
"""

from __future__ import annotations

import string
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from octavo.models.tokenizers.pieces import byte_alphabet

_ALNUM = frozenset((string.ascii_letters + string.digits).encode())
# What a character begins with in UTF-8, and all bytes that it may have.
_FIRST = frozenset((*range(0x80), *range(0xC2, 0xF5)))
_UTF8 = frozenset((*range(0xC0), *range(0xC2, 0xF5)))

_SLICE = 64 * 2**10
"""Characters that are counted in one go: other threads wait so long."""

_SPACE, _UNDERLINE = " ", "\u2581"

# Each leaves as many characters as there were, or more; of ASCII letters and digits too.
_KEEPING_NORMALIZERS = {"ByteLevel", "Lowercase", "NFD", "NFKD"}
# Canonical composition makes one character of at most four.
_COMPOSING_NORMALIZERS = {"NFC", "NFKC"}
_COMPOSED = 4
_KEEPING_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits"}
# `Removed` drops what it finds.
_KEEPING_SPLITS = {"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"}


@dataclass(frozen=True)
class FewestTokens:
    """The bound of one tokenizer. alnum, other: least share of a token that an ASCII letter or
    digit, and any other character, takes. composes: whether several characters may become one.
    known: bytes that are never lost, by which characters are told apart."""

    alnum: Fraction
    other: Fraction
    composes: bool
    known: frozenset[int]

    def __call__(self, text: str) -> int:
        """A number of tokens that `text` has at least."""
        if self.composes and not text.isascii():
            return int(len(text) * min(self.alnum, self.other) / _COMPOSED)
        alnum, other = bytes(self.known & _ALNUM), bytes(self.known & (_FIRST - _ALNUM))
        bound = Fraction(0)
        for start in range(0, len(text), _SLICE):
            data = text[start : start + _SLICE].encode()
            bound += _count(data, alnum) * self.alnum + _count(data, other) * self.other
        return int(bound)


def fewest_tokens(
    spec: Mapping[str, Any], vocab: Collection[str], normalized: Iterable[str] = ()
) -> FewestTokens | None:
    """The bound of a tokenizer.json. vocab: the model's pieces. normalized: added tokens as they
    look in a normalized text. None: no bound is known."""
    normalizers = list(_parts(spec.get("normalizer"), "normalizers"))
    splitters = list(_parts(spec.get("pre_tokenizer"), "pretokenizers"))
    if not all(map(_keeps_characters, normalizers)) or not all(map(_keeps_words, splitters)):
        return None
    kinds = {part.get("type") for part in (*normalizers, *splitters)}
    known = _known_bytes(spec.get("model") or {}, vocab, "ByteLevel" in kinds)
    if not known or (normalizers and not known >= _UTF8):
        return None
    added = spec.get("added_tokens") or []
    pieces = {*vocab, *(token["content"] for token in added), *normalized}
    # An added token may swallow any number of spaces beside it.
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    other = Fraction(0 if swallows else 1, max(map(len, pieces)))
    # All characters of a piece together may take one token at most.
    every = bytes(_ALNUM)
    counts = {(_count(piece.encode("utf-8", "replace"), every), len(piece)) for piece in pieces}
    shares = ((1 - (length - alnum) * other) / alnum for alnum, length in counts if alnum)
    composes = bool(kinds & _COMPOSING_NORMALIZERS)
    return FewestTokens(min(shares, default=other), other, composes, known)


def _count(data: bytes, which: bytes) -> int:
    """How many bytes of `data` are among `which`."""
    return len(data) - len(data.translate(None, which))


def _parts(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    """A part, or the parts of a sequence of them."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for inner in part[name]:
        yield from _parts(inner, name)


def _keeps_characters(normalizer: Mapping[str, Any]) -> bool:
    kind = normalizer.get("type")
    if kind == "Prepend":
        return normalizer.get("prepend") == _UNDERLINE
    if kind == "Replace":
        spaces = normalizer.get("pattern") == {"String": _SPACE}
        return spaces and normalizer.get("content") == _UNDERLINE
    return kind in _KEEPING_NORMALIZERS | _COMPOSING_NORMALIZERS


def _keeps_words(splitter: Mapping[str, Any]) -> bool:
    kind = splitter.get("type")
    if kind in ("Split", "Punctuation"):
        return splitter.get("behavior") in _KEEPING_SPLITS
    return kind in _KEEPING_PRE_TOKENIZERS


def _known_bytes(
    model: Mapping[str, Any], vocab: Collection[str], byte_level: bool
) -> frozenset[int]:
    """Bytes of a text that its tokens surely hold. What is unknown may become one token whatever
    its length, or none."""
    affixes = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    if model.get("type") != "BPE" or affixes:
        return frozenset()
    if byte_level:
        letters = byte_alphabet().items()
        return frozenset(byte[0] for letter, byte in letters if letter in vocab)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    whole = bool(model.get("byte_fallback")) and all(name in vocab for name in names)
    return frozenset(range(256)) if whole else frozenset()
