"""The files of `octavo run-batch`: requests and results, one JSON object a line, in the format of
OpenAI's batches.

Neither file is held in memory: of each line only its place is.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import msgspec

from octavo.core.errors import ConfigError, nearest

MAX_PROBLEMS = 20
"""Wrong lines that are told of one file."""

SHOWN = 80


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Answered(msgspec.Struct):
    class Response(msgspec.Struct):
        status_code: int

    custom_id: str
    response: Response | None  # without this key it is no result


@dataclass(frozen=True)
class BatchRequest:
    """Where a request stands in the file of requests. line: from 1."""

    custom_id: str
    url: str
    line: int
    offset: int
    length: int


class BadBatchFile(ConfigError):
    """Lines are wrong. problems: one `ConfigError` a line, at most `MAX_PROBLEMS`."""

    def __init__(self, problems: list[ConfigError], file: str) -> None:
        more = f" (and {len(problems) - 1} more lines)" if len(problems) > 1 else ""
        super().__init__(problems[0].message + more, file=file, line=problems[0].line)
        self.problems = problems


def read_requests(path: Path, urls: Collection[str]) -> list[BatchRequest]:
    """Every request of the file, checked but for its body. Raises `ConfigError`."""
    requests: list[BatchRequest] = []
    problems: list[ConfigError] = []
    first_lines: dict[str, int] = {}
    for number, offset, line in _lines(path):
        if not line.strip():
            continue
        try:
            found = _parse(line, urls)
            first = first_lines.setdefault(found.custom_id, number)
            if first != number:
                raise ValueError(f"custom_id '{found.custom_id}' is that of line {first} too")
        except ValueError as error:
            problems.append(ConfigError(str(error), file=str(path), line=number))
            if len(problems) == MAX_PROBLEMS:
                break
            continue
        requests.append(BatchRequest(found.custom_id, found.url, number, offset, len(line)))
    if problems:
        raise BadBatchFile(problems, str(path))
    if not requests:
        raise ConfigError("the file has no requests", file=str(path))
    return requests


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Number, offset and content of every line, without what ends it."""
    try:
        with path.open("rb") as file:
            offset = 0
            for number, line in enumerate(file, 1):
                yield number, offset, line.rstrip(b"\r\n")
                offset += len(line)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", file=str(path)) from None


def _parse(line: bytes, urls: Collection[str]) -> _Line:
    """One line. Raises ValueError, saying what is wrong with it."""
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.ValidationError as error:
        raise ValueError(f"not a batch request: {error}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON: {error or 'nested too deeply'}") from None
    if not found.custom_id:
        raise ValueError("custom_id is empty")
    if found.method != "POST":
        raise ValueError(f"expected method 'POST', got {found.method[:SHOWN]!r}")
    if found.url not in urls:
        hint = nearest(found.url, urls)
        raise ValueError(f"there is no url {found.url[:SHOWN]!r} for batches; {hint}")
    if not bytes(found.body).lstrip().startswith(b"{"):
        raise ValueError("expected body to be an object")
    return found


def read_body(file: BinaryIO, request: BatchRequest) -> bytes:
    """The body of a request, as it is written in the open file."""
    file.seek(request.offset)
    return bytes(msgspec.json.decode(file.read(request.length), type=_Line).body)


class Results:
    """The file of results, open for more of them. Use as a context manager.

    Results are written whole, one at a time, as they come: whenever the program ends, those are
    kept. A line that was cut off is dropped when the file is opened again.

    requests: of the file of requests; a result of another one raises `ConfigError`.
    """

    def __init__(self, path: Path, requests: list[BatchRequest], *, restart: bool = False) -> None:
        self._path, self._requests = path, requests
        self._places: dict[str, tuple[int, int]] = {}
        self.errors: set[str] = set()
        """custom_ids of answers that are errors."""
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", file=str(path)) from None
        try:
            self._lock()
            if restart:
                self._file.truncate(0)
            self._load({request.custom_id for request in requests})
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def num_answered(self) -> int:
        """Requests with a result."""
        return len(self._places)

    def missing(self) -> list[BatchRequest]:
        """Requests without a result, in order."""
        return [request for request in self._requests if request.custom_id not in self._places]

    def write(self, custom_id: str, status: int, line: bytes) -> None:
        """Add one result."""
        self._places[custom_id] = (self._file.seek(0, os.SEEK_END), len(line))
        if status != 200:
            self.errors.add(custom_id)
        self._file.write(line + b"\n")
        self._file.flush()

    def sort(self) -> None:
        """Bring the results into the order of the requests, in one step of the file system."""
        order = [request.custom_id for request in self._requests]
        wanted = [self._places[custom_id] for custom_id in order if custom_id in self._places]
        nothing_else = sum(length + 1 for _, length in wanted) == os.path.getsize(self._path)
        if nothing_else and wanted == sorted(wanted):
            return
        target = self._path.resolve()
        copy = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with copy.open("wb") as file:
                for offset, length in wanted:
                    self._file.seek(offset)
                    file.write(self._file.read(length) + b"\n")
            os.replace(copy, target)
        finally:
            copy.unlink(missing_ok=True)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError("another run writes this file", file=str(self._path)) from None

    def _load(self, known: Collection[str]) -> None:
        """Note what is answered. An error of the server (5xx) is asked again."""
        end, size = 0, os.path.getsize(self._path)
        for number, offset, line in _lines(self._path):
            if offset + len(line) == size:
                break  # without its newline: it was cut off
            end = offset + len(line) + 1
            if not line.strip():
                continue
            try:
                found = msgspec.json.decode(line, type=_Answered)
            except (msgspec.MsgspecError, ValueError):
                raise ConfigError(
                    "not a result of a batch; name another file, or use --restart",
                    file=str(self._path),
                    line=number,
                ) from None
            if found.custom_id not in known:
                raise ConfigError(
                    f"custom_id {found.custom_id[:SHOWN]!r} is not among the requests; name "
                    "another file, or use --restart",
                    file=str(self._path),
                    line=number,
                )
            status = 500 if found.response is None else found.response.status_code
            if status < 500:
                self._places[found.custom_id] = (offset, len(line))
                if status != 200:
                    self.errors.add(found.custom_id)
        self._file.truncate(end)


def result_line(custom_id: str, number: str, status: int, request_id: str, body: Any) -> bytes:
    """One line of results. body: raw JSON (`msgspec.Raw`) or what becomes it."""
    return msgspec.json.encode(
        {
            "id": number,
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": body},
            "error": None,
        }
    )
