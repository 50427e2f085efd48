"""Large JSON bodies, decoded in a thread without holding up the event loop.

A decoder in C holds the interpreter's lock until it is done: 32 MiB take 40 ms where they are one
string, 200 ms as token ids and 5 s as small arrays and objects. So token ids are decoded in pieces,
and of other values a large body may have `MAX_VALUES`; what is left is text.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import msgspec

from octavo.server.http.errors import ApiError

T = TypeVar("T")

LARGE = 256 * 2**10
"""Bytes of a body from which on it counts as large. A smaller one takes up to 40 ms."""

MAX_VALUES = 100_000
"""Most members and items of all objects and arrays of a large body, lists of token ids apart."""

MANY_MESSAGES, MANY_IDS = 1000, 100_000
"""What is dealt with in a thread when there are more."""

BACKSLASH = 0x5C

PIECE = 64 * 2**10
"""Bytes that are looked at in one go."""

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ids = msgspec.json.Decoder(list[int])
_between = re.compile(rb"\s*(?:,\s*)?")
_inside = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class Threads:
    """Where an API process does what would hold up its event loop. The large has few threads of
    its own, so that the small need not wait for it. The work must come back to Python every few
    milliseconds, as code in C keeps the lock, or give that up as tokenizers do."""

    LARGE = 2

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(self.LARGE, "octavo-large")

    async def if_large(self, large: bool, work: Callable[[], T]) -> T:
        """The result of `work`; what is not large is done at once."""
        return await self.run(large, work) if large else work()

    async def run(self, large: bool, work: Callable[[], T]) -> T:
        """The result of `work`, done in a thread in any case."""
        if not large:
            return await asyncio.to_thread(work)
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    def close(self) -> None:
        """What has not begun never will."""
        self._large.shutdown(wait=False, cancel_futures=True)


def decode_large(data: bytes) -> dict[str, Any]:
    """As `msgspec.json.decode`, of an object. Raises what that raises, and `ApiError` for too many
    values."""
    if sum(1 for _ in islice(_outside_strings(data), 2 * MAX_VALUES)) == 2 * MAX_VALUES:
        raise _too_many(data)  # if only as names of members
    members, found = _members.decode(data), {}
    left = MAX_VALUES - len(members)
    for name, raw in members.items():
        text = bytes(raw)
        ids = token_ids(text) if len(text) > PIECE else None
        if ids is None:
            left -= count_values(text, left)
        elif ids and isinstance(ids[0], list):
            left -= len(ids)
        if left < 0:
            raise _too_many(data)
        found[name] = msgspec.json.decode(text) if ids is None else ids
    return found


def _too_many(data: bytes) -> ApiError:
    return ApiError(
        f"a body of {len(data)} bytes may have at most {MAX_VALUES} values in its objects and "
        "arrays, lists of token ids apart; it has more",
        code="invalid_json",
    )


def token_ids(text: bytes) -> list[int] | list[list[int]] | None:
    """A list of integers, or of lists of them, read in pieces; None: it is something else. text:
    valid JSON without space around it."""
    if not text.startswith(b"["):
        return None
    try:
        begin = _after_space(text, 1)
        first = text[begin : begin + 1]
        if first.isdigit() or first == b"-":
            return _integers(text, 1, len(text) - 1)
        lists: list[list[int]] = []
        end = len(text) - 1
        while begin < end and len(lists) <= MAX_VALUES:
            close = text.index(b"]", begin)
            if text[begin : begin + 1] != b"[":
                return None
            lists.append(_integers(text, begin + 1, close))
            begin = _after_space(text, close + 1)
        return lists if begin == end else None
    except (msgspec.MsgspecError, ValueError):
        return None


def _integers(text: bytes, begin: int, end: int) -> list[int]:
    """Numbers with commas between. Pieces that are lists of integers make up one: a comma inside
    of anything else would leave pieces that are not."""
    found: list[int] = []
    while begin < end:
        cut = text.find(b",", begin + PIECE, end)
        stop = end if cut < 0 else cut
        found += _ids.decode(b"[" + text[begin:stop] + b"]")
        begin = stop + 1
    return found


def _after_space(text: bytes, begin: int) -> int:
    match = _between.match(text, begin)
    assert match is not None, "it matches nothing, too"
    return match.end()


def count_values(text: bytes, most: int) -> int:
    """Commas and opening brackets outside of strings, or some number over `most`. text: valid
    JSON."""
    if text.startswith(b'"'):
        return 0
    count = 0
    for begin, end in _outside_strings(text):
        count += sum(text.count(mark, begin, end) for mark in (b",", b"[", b"{"))
        if count > most:
            break
    return count


def _outside_strings(text: bytes) -> Iterator[tuple[int, int]]:
    """Begin and end of what is before, between and after strings."""
    begin = 0
    while (end := text.find(b'"', begin)) >= 0:
        yield begin, end
        begin = _after_string(text, end + 1)
    yield begin, len(text)


def _after_string(text: bytes, begin: int) -> int:
    """Behind the quote that ends the string whose text begins here."""
    quote = text.find(b'"', begin)
    if quote < 0:
        return len(text)
    if quote == begin or text[quote - 1] != BACKSLASH:
        return quote + 1
    while begin < len(text):
        match = _inside.match(text, begin, begin + PIECE)
        assert match is not None, "it matches nothing, too"
        end = match.end()
        if text[end : end + 1] == b'"':
            return end + 1
        if end == begin:  # a lone backslash: no valid JSON
            break
        begin = end
    return len(text)
