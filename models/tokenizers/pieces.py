"""From a vocabulary's pieces to the bytes they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

Alphabet = Literal["byte_level", "sentence_piece", "plain"]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def alphabet(decoder: Mapping[str, Any] | None) -> Alphabet:
    """How pieces are spelled, from the `decoder` of a tokenizer.json."""
    if decoder is None:
        return "plain"
    kinds = {decoder.get("type")} | {part.get("type") for part in decoder.get("decoders") or ()}
    if "ByteLevel" in kinds:
        return "byte_level"
    return "sentence_piece" if kinds & {"ByteFallback", "Metaspace", "Replace"} else "plain"


def piece_bytes(piece: str, kind: Alphabet) -> bytes:
    """Bytes of a piece inside a text: byte-level pieces may be half a character, `<0x0A>` is one
    byte and U+2581 a space where pieces are SentencePiece's."""
    if kind == "byte_level":
        table = byte_alphabet()
        return b"".join(table.get(c, c.encode("utf-8", "surrogatepass")) for c in piece)
    if kind == "sentence_piece":
        match = _BYTE_PIECE.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        piece = piece.replace("\u2581", " ")
    return piece.encode()


@cache
def byte_alphabet() -> dict[str, bytes]:
    """GPT-2's letters for bytes: visible Latin-1 characters are themselves, the others follow in
    order from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(visible)]
    letters = {chr(byte): bytes([byte]) for byte in visible}
    return letters | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
