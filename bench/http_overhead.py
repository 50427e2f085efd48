"""`octavo bench http-overhead`: what HTTP, tokens to text and two processes cost, without a model.

A real server (`octavo serve`) with a real engine process whose executor answers at once. Streams
read one event a token. The time to the first token is compared with the engine in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.bench.result_file import write_json
from octavo.bench.server_process import ServerProcess
from octavo.testing.model_folder import write_model_folder

PROMPT = "the quick brown fox jumps over it "


def settings(folder: Path, streams: int, max_tokens: int) -> dict[str, Any]:
    """A configuration whose engine has room for all streams at once."""
    return {
        "model": {"source": str(folder), "weight_source": "dummy"},
        "plugins": {"load": ["octavo.testing.instant_executor"]},
        "executor": {"kind": "instant"},
        "kv_cache": {"num_blocks": streams * (max_tokens // 16 + 8)},
        "scheduler": {"max_num_seqs": streams, "max_num_batched_tokens": 8192},
    }


class _Reader(asyncio.Protocol):
    """One streaming request. Counts events, and looks at nothing else."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events, self.first = 0, 0.0
        self.begun = time.perf_counter()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self.begun = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        events = data.count(b"\ndata: {")
        if events and not self.events:
            self.first = time.perf_counter() - self.begun
        self.events += events
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError(f"it ended: {self._tail!r}"))


def request(path: str, body: dict[str, Any]) -> bytes:
    """The bytes of a POST request."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def _stream(port: int, data: bytes) -> _Reader:
    loop = asyncio.get_running_loop()
    transport, reader = await loop.create_connection(lambda: _Reader(data), "127.0.0.1", port)
    try:
        await reader.done
    finally:
        transport.close()
    return reader


def body(path: str, max_tokens: int) -> dict[str, Any]:
    """A streaming request for exactly so many tokens."""
    given: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        given = {"messages": [{"role": "user", "content": PROMPT}]}
    return {**given, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}


async def throughput(
    server: ServerProcess, path: str, streams: int, max_tokens: int
) -> dict[str, Any]:
    """Streamed tokens a second of `streams` requests at once."""
    data = request(path, body(path, max_tokens))
    before, begin = server.cpu_s(), time.perf_counter()
    readers = await asyncio.gather(*(_stream(server.port, data) for _ in range(streams)))
    seconds = time.perf_counter() - begin
    tokens = streams * max_tokens
    used = {name: value - before[name] for name, value in server.cpu_s().items()}
    return {
        "tokens_per_s": tokens / seconds,
        "events_per_token": sum(reader.events for reader in readers) / tokens,
        **{f"{name}_us_per_token": value / tokens * 1e6 for name, value in used.items()},
    }


async def first_tokens(port: int, path: str, count: int) -> list[float]:
    """Seconds to the first token through HTTP, one request at a time."""
    data = request(path, body(path, 2))
    return [(await _stream(port, data)).first for _ in range(count)]


async def first_tokens_inside(config: dict[str, Any], count: int) -> list[float]:
    """The same of the engine in this process."""
    from octavo.core.sampling_params import SamplingParams
    from octavo.frontend.async_llm import AsyncLLM

    found = []
    async with AsyncLLM(config=config) as llm:
        for _ in range(count):
            begin = time.perf_counter()
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            async for _ in llm.stream(PROMPT, params):
                found.append(time.perf_counter() - begin)
                break
    return found


def measure(streams: int, max_tokens: int, repeat: int, path: str) -> dict[str, Any]:
    """All numbers; throughput is the best of `repeat` runs, times are medians in milliseconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model_folder(folder / "model", max_model_len=max(4096, max_tokens + 256))
        config = settings(folder / "model", streams, max_tokens)
        server = ServerProcess(config)
        try:
            asyncio.run(throughput(server, path, streams, 8))  # warm
            runs = [
                asyncio.run(throughput(server, path, streams, max_tokens)) for _ in range(repeat)
            ]
            outside = asyncio.run(first_tokens(server.port, path, 30))
        finally:
            server.stop()
        inside = asyncio.run(first_tokens_inside(config, 30))
    best = max(runs, key=lambda run: float(run["tokens_per_s"]))
    http_ms, inside_ms = (float(np.median(times[5:])) * 1e3 for times in (outside, inside))
    return {
        **best,
        "all_tokens_per_s": [run["tokens_per_s"] for run in runs],
        "first_token_http_ms": http_ms,
        "first_token_inside_ms": inside_ms,
        "first_token_added_ms": http_ms - inside_ms,
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--streams", type=int, default=64, help="concurrent requests")
    parser.add_argument("--max-tokens", type=int, default=256, help="output tokens per request")
    parser.add_argument("--repeat", type=int, default=3, help="runs; the best one counts")
    parser.add_argument("--chat", action="store_true", help="use /v1/chat/completions")
    parser.add_argument("--json", metavar="FILE", help="write the results as JSON")


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    numbers = measure(args.streams, args.max_tokens, args.repeat, path)
    print(f"{args.streams} streams of {args.max_tokens} tokens at {path}")
    print(
        f"  {numbers['tokens_per_s']:,.0f} streamed tokens/s,"
        f" {numbers['events_per_token']:.2f} events a token"
    )
    for name in ("api", "engine"):
        print(f"  {name} process {numbers[f'{name}_us_per_token']:.0f} us of processor a token")
    print(
        f"  first token {numbers['first_token_http_ms']:.2f} ms through HTTP,"
        f" {numbers['first_token_inside_ms']:.2f} ms inside:"
        f" {numbers['first_token_added_ms']:.2f} ms added"
    )
    if args.json:
        write_json(Path(args.json), numbers)
    return 0
