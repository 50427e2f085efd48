"""Requests of a trace, one after another: nothing is held but the line being read.

Formats: `mooncake` (JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids`
one per block of 512 tokens), `azure` (CSV with `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`),
`jsonl` (Octavo's own, see docs/simulate.md). Equal ids after equal ids mean equal content.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import OctavoError

BLOCK_TOKENS = 512
_MOST = 2**31 - 1  # of what engines count in 32 bits
_LONGEST = 2.0**53  # up to here floats tell whole numbers apart


class TraceError(OctavoError):
    """A trace cannot be read; names the file and the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """arrival: seconds since the first request. num_prompt, num_output: tokens. blocks: ids of the
    prompt's blocks of `block_tokens` tokens, None or too few: the rest is like nothing else."""

    arrival: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] | None = None
    block_tokens: int = BLOCK_TOKENS
    user: str | None = None
    priority: int = 0


class _FieldError(ValueError):
    """A field holds something else than expected."""

    def __init__(self, name: str, expected: str, value: Any) -> None:
        super().__init__(f"'{name}': expected {expected}, got {value!r}")


def _time(row: Mapping[str, Any], name: str, unit: str) -> float:
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST:
        raise _FieldError(name, f"a number of {unit}, 0 or more", value)
    return float(value)


def _count(row: Mapping[str, Any], name: str, least: int, default: int | None = None) -> int:
    value = row[name] if default is None else row.get(name, default)
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or not least <= value <= _MOST:
        raise _FieldError(name, f"a whole number from {least} to {_MOST}", value)
    return int(value)


def _text_count(row: Mapping[str, Any], name: str) -> int:
    """Of a table, which holds texts; a column that a line does not reach is None."""
    text = row[name]
    given = int(text) if isinstance(text, str) and text.strip().isdecimal() else text
    return _count({name: given}, name, 0)


def _ids(row: Mapping[str, Any], name: str) -> tuple[int, ...]:
    ids = row[name]
    numbers = isinstance(ids, list) and all(type(i) is int and -(2**63) <= i < 2**63 for i in ids)
    if not numbers:
        raise _FieldError(name, "a list of whole numbers of 64 bits", ids)
    return tuple(ids)


def _mooncake(row: Mapping[str, Any]) -> TraceRequest:
    return TraceRequest(
        arrival=_time(row, "timestamp", "milliseconds") / 1000,
        num_prompt=_count(row, "input_length", 0),
        num_output=_count(row, "output_length", 0),
        blocks=_ids(row, "hash_ids"),
    )


def _azure(row: Mapping[str, Any]) -> TraceRequest:
    text = row["TIMESTAMP"]
    try:
        moment = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise _FieldError("TIMESTAMP", "a date and time (ISO 8601)", text) from None
    return TraceRequest(
        arrival=(moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp(),
        num_prompt=_text_count(row, "ContextTokens"),
        num_output=_text_count(row, "GeneratedTokens"),
    )


def _jsonl(row: Mapping[str, Any]) -> TraceRequest:
    user = row.get("user")
    if user is not None and (isinstance(user, bool) or not isinstance(user, str | int)):
        raise _FieldError("user", "a text or a whole number", user)
    return TraceRequest(
        arrival=_time(row, "arrival", "seconds"),
        num_prompt=_count(row, "prompt_tokens", 1),
        num_output=_count(row, "output_tokens", 1),
        blocks=None if row.get("hash_ids") is None else _ids(row, "hash_ids"),
        block_tokens=_count(row, "block_tokens", 1, BLOCK_TOKENS),
        user=None if user is None else str(user),
        priority=_count(row, "priority", -_MOST, 0),
    )


FORMATS: dict[str, Callable[[Mapping[str, Any]], TraceRequest]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "jsonl": _jsonl,
}


def guess_format(path: Path) -> str:
    """By the name's ending, and for JSON lines by the keys of the first line."""
    if path.suffix.lower() == ".csv":
        return "azure"
    with _open(path) as file:
        return "mooncake" if '"timestamp"' in file.readline() else "jsonl"


def read_trace(path: Path, kind: str) -> Iterator[TraceRequest]:
    """The requests of a file in order of arrival, the first at 0 s. Lengths of 0, which
    published traces have, become 1. Raises `TraceError` naming the line and the field that are
    wrong, or the line that goes back in time."""
    parse = FORMATS[kind]
    start, last = None, 0.0
    for number, row in _rows(path, kind):
        try:
            request = parse(row)
        except KeyError as exc:
            raise TraceError(f"{path}:{number}: {exc} is missing ({kind} trace)") from None
        except _FieldError as exc:
            raise TraceError(f"{path}:{number}: {exc} ({kind} trace)") from None
        start = request.arrival if start is None else start
        arrival = request.arrival - start
        if arrival < last:
            raise TraceError(
                f"{path}:{number}: arrives {last - arrival:g} s before the line above it; sort "
                "the trace by time"
            )
        last = arrival
        yield replace(
            request,
            arrival=arrival,
            num_prompt=max(1, request.num_prompt),
            num_output=max(1, request.num_output),
        )


def _open(path: Path) -> Any:
    try:
        return path.open(encoding="utf-8", newline="")
    except OSError as exc:
        raise TraceError(f"cannot read the trace '{path}': {exc.strerror}") from None


def _rows(path: Path, kind: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers and what the lines hold."""
    with _open(path) as file:
        if kind == "azure":
            yield from enumerate(csv.DictReader(file), start=2)
            return
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as exc:
                raise TraceError(f"{path}:{number}: not valid JSON: {exc}") from None
            if not isinstance(row, dict):
                raise TraceError(f"{path}:{number}: expected an object")
            yield number, row


def synthetic(
    num: int, rate: float, input_len: int, output_len: int, seed: int = 0
) -> Iterator[TraceRequest]:
    """Poisson arrivals, `rate` a second; lengths exponential around the means, cut to 1 .. 8 times
    the mean. The same seed gives the same requests."""
    draw = np.random.RandomState(seed)  # its stream never changes, unlike Generator's
    now = 0.0
    for begin in range(0, num, 1024):
        # Whole chunks are drawn, so that a shorter run is the beginning of a longer one.
        gaps = draw.exponential(1 / rate, 1024)
        sizes = [
            np.clip(np.rint(draw.exponential(mean, 1024)), 1, 8 * mean).astype(int)
            for mean in (input_len, output_len)
        ]
        rows = zip(gaps.tolist(), sizes[0].tolist(), sizes[1].tolist(), strict=True)
        for gap, prompt, output in islice(rows, num - begin):
            now += gap
            yield TraceRequest(now, prompt, output)


def shaped(
    requests: Iterable[TraceRequest],
    speedup: float = 1.0,
    limit: int | None = None,
    users: int = 0,
    max_output: int | None = None,
) -> Iterator[TraceRequest]:
    """The first `limit` requests, `speedup` times as fast. users: deal those without a user out to
    so many users in turn (0: leave them). max_output: most tokens that one generates."""
    for number, request in enumerate(islice(requests, limit)):
        user = request.user
        if users and user is None:
            user = f"user-{number % users}"
        output = request.num_output if max_output is None else min(request.num_output, max_output)
        yield replace(request, arrival=request.arrival / speedup, user=user, num_output=output)


class Prompts:
    """Token ids for the prompts of a trace, from the upper half of a vocabulary (what a simulated
    executor generates is from the lower half). Blocks with equal ids get equal tokens, others
    differ."""

    def __init__(self, vocab_size: int) -> None:
        self._low = vocab_size // 2
        self._count = np.uint64(max(1, vocab_size - self._low))

    def tokens(self, request: TraceRequest, number: int) -> NDArray[np.int32]:
        """int32[num_prompt] for the request with this number in the trace."""
        size = min(request.block_tokens, request.num_prompt)
        num_blocks = -(-request.num_prompt // size)
        ids = np.arange(num_blocks, dtype=np.uint64) + np.uint64(((number + 1) << 24) | 1 << 63)
        known = (request.blocks or ())[:num_blocks]
        ids[: len(known)] = np.asarray(known, np.int64).astype(np.uint64)
        # A counter-based generator: block id and position, mixed (the finalizer of splitmix64).
        with np.errstate(over="ignore"):
            state = _mix(ids)[:, None] + np.arange(size, dtype=np.uint64) * _ODD
            state = (state ^ (state >> np.uint64(31))) * _SECOND
            drawn = (state >> np.uint64(32)) * self._count >> np.uint64(32)
        tokens: NDArray[np.int32] = drawn.reshape(-1)[: request.num_prompt].astype(np.int32)
        tokens += self._low
        return tokens


_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer (Steele, Lea, Flood, OOPSLA 2014)."""
    values = values * _ODD
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    return values ^ (values >> np.uint64(31))
