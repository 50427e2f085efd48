"""A small HTTP/1.1 client over h11: many streams at once, kept connections, little work an event.

A load generator shares the machine with what it measures, so what it does itself must be cheap.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import urlsplit

import h11

from octavo.core.errors import ConfigError, OctavoError

READ_BYTES = 65536
SILENCE_S = 600.0
"""Seconds without a byte after which a request has failed."""


class HttpError(OctavoError):
    """The server answered with an error, or not at all. status: None when there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.state = h11.Connection(h11.CLIENT)

    async def next_event(self) -> Any:
        while True:
            event = self.state.next_event()
            if event is not h11.NEED_DATA:
                return event
            async with asyncio.timeout(SILENCE_S):
                data = await self.reader.read(READ_BYTES)
            self.state.receive_data(data)


class HttpClient:
    """Requests to one server. url: `http://host:port` with an optional prefix of all paths."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Sequence[tuple[str, str]] = (),
        verify: bool = True,
    ) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"expected a URL such as http://127.0.0.1:8000, got '{url}'")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._prefix = parts.path.rstrip("/")
        self._ssl: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._ssl = ssl.create_default_context()
            if not verify:
                self._ssl.check_hostname, self._ssl.verify_mode = False, ssl.CERT_NONE
        self._headers = [("host", parts.netloc), ("accept", "*/*"), *headers]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._idle: list[_Connection] = []

    async def close(self) -> None:
        """Close the kept connections."""
        while self._idle:
            await _close(self._idle.pop())

    async def json(self, method: str, path: str, body: Any = None) -> Any:
        """A whole answer, decoded. Raises `HttpError` for any status but 200."""
        data = b"".join([chunk async for chunk in self.stream(method, path, body)])
        try:
            return json.loads(data) if data.strip() else None
        except ValueError:
            raise HttpError(f"{self.url}{path} did not return JSON: {data[:200]!r}") from None

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of server-sent events, as they come, without `[DONE]`."""
        rest = b""
        async with aclosing(self.stream("POST", path, body)) as chunks:
            async for chunk in chunks:
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data and data != b"[DONE]":
                            yield data

    async def stream(self, method: str, path: str, body: Any = None) -> AsyncGenerator[bytes, None]:
        """The pieces of an answer. Raises `HttpError`."""
        connection = await self._send(method, path, body)
        whole = False
        try:
            response = await connection.next_event()
            while isinstance(response, h11.InformationalResponse):
                response = await connection.next_event()
            if not isinstance(response, h11.Response):
                raise HttpError(f"{self.url}{path}: the connection was closed before a response")
            if response.status_code != 200:
                text = await _body(connection)
                raise HttpError(
                    f"{path}: {response.status_code}: {_reason(text)}", response.status_code
                )
            while isinstance(event := await connection.next_event(), h11.Data):
                yield bytes(event.data)
            whole = isinstance(event, h11.EndOfMessage)
            if not whole:
                raise HttpError(f"{self.url}{path}: the connection was closed during a response")
        except (OSError, h11.RemoteProtocolError) as exc:
            raise HttpError(f"{self.url}{path}: {exc or type(exc).__name__}") from exc
        finally:
            if whole and connection.state.our_state is h11.DONE is connection.state.their_state:
                connection.state.start_next_cycle()
                self._idle.append(connection)
            else:
                await _close(connection)

    async def _send(self, method: str, path: str, body: Any) -> _Connection:
        data = b"" if body is None else json.dumps(body).encode()
        headers = [*self._headers, ("content-length", str(len(data)))]
        if data:
            headers.append(("content-type", "application/json"))
        request = h11.Request(method=method, target=self._prefix + path, headers=headers)
        connection = await self._connection()
        parts = (request, h11.Data(data=data), h11.EndOfMessage())
        connection.writer.write(b"".join(connection.state.send(part) or b"" for part in parts))
        try:
            await connection.writer.drain()
        except OSError as exc:
            await _close(connection)
            raise HttpError(f"cannot send to {self.url}: {exc}") from exc
        return connection

    async def _connection(self) -> _Connection:
        while self._idle:
            kept = self._idle.pop()
            if not kept.reader.at_eof():
                return kept
            await _close(kept)
        try:
            pair = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except OSError as exc:
            raise HttpError(f"cannot connect to {self.url}: {exc}") from exc
        return _Connection(*pair)


async def _body(connection: _Connection) -> bytes:
    data = b""
    while isinstance(event := await connection.next_event(), h11.Data):
        data += event.data
    return data


def _reason(text: bytes) -> str:
    """The message of an error in OpenAI's form, else the beginning of the text."""
    with suppress(ValueError, AttributeError):
        found = json.loads(text)
        error = found.get("error", found)
        if isinstance(error, dict) and error.get("message"):
            return str(error["message"])
    return text[:300].decode(errors="replace")


async def _close(connection: _Connection) -> None:
    connection.writer.close()
    with suppress(OSError, asyncio.CancelledError):
        await connection.writer.wait_closed()
