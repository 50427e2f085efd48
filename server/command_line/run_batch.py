"""`octavo run-batch`: a file of requests through the server's own application, without a socket.

Exit status: 0 when every request was answered with status 200, 1 when some were not or the engine
stopped, 2 for files or a configuration that are wrong, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.applications import Starlette

from octavo.core.errors import ConfigError, EngineDeadError, OctavoError
from octavo.core.registry import Registry
from octavo.engine.process.process import EngineProcess
from octavo.frontend.async_engine import Parts
from octavo.frontend.async_llm import AsyncLLM
from octavo.frontend.process_client import parts
from octavo.server.app.app import create_app
from octavo.server.app.http_server import say
from octavo.server.app.routes import OPERATIONS
from octavo.server.command_line.batch_file import (
    BadBatchFile,
    BatchRequest,
    Results,
    read_body,
    read_requests,
)
from octavo.server.command_line.batch_file import result_line as line_of
from octavo.server.command_line.config import add_config_arguments, config_from_args
from octavo.server.config import ServiceConfig
from octavo.server.http.errors import ApiError
from octavo.server.openai.answer import AnswerParsers, make_parsers
from octavo.server.openai.state import ServerState
from octavo.server.process.session import loop_factory, on_signals

INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags, and those of `octavo serve`."""
    parser.add_argument(
        "-i", "--input-file", required=True, type=Path, metavar="FILE", help="requests, JSON lines"
    )
    parser.add_argument(
        "-o",
        "--output-file",
        required=True,
        type=Path,
        metavar="FILE",
        help="results, JSON lines; an existing file is resumed",
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard existing results and start over"
    )
    parser.add_argument(
        "--max-concurrency",
        type=_positive,
        metavar="N",
        help="maximum number of concurrent requests; default: twice scheduler.max_num_seqs",
    )
    add_config_arguments(parser)


def _positive(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def main(args: argparse.Namespace) -> int:
    """`octavo run-batch`."""
    config, registry = config_from_args(args)
    if not config.model.source:
        raise ConfigError("no model given; expected MODEL or --model", path="model.source")
    if _same_file(args.input_file, args.output_file):
        raise ConfigError(f"'{args.output_file}' holds the requests; expected another output file")
    try:
        requests = read_requests(args.input_file, batch_urls())
        with Results(args.output_file, requests, restart=args.restart) as results:
            if not results.missing():
                return _conclude(results, len(requests))
            batch = Batch(args.input_file, results, args.max_concurrency)
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                work = batch.run(
                    engine_for(config, registry), config, partial(make_parsers, config, registry)
                )
                status = runner.run(work)
            return status or _conclude(results, len(requests))
    except BadBatchFile as error:
        for problem in error.problems:
            say(f"octavo: {problem}")
        return 2
    except EngineDeadError as error:
        say(f"octavo: {error}; what was answered is kept, the same command continues")
        return 1


def _same_file(one: Path, other: Path) -> bool:
    return one.exists() and other.exists() and one.samefile(other)


def batch_urls() -> list[str]:
    """Routes that a line may name."""
    return [op.path for op in OPERATIONS if op.method == "POST" and op.path.startswith("/v1/")]


def engine_for(config: ServiceConfig, registry: Registry) -> Callable[[], AsyncLLM]:
    """Makes, in the loop, an engine in a process of its own."""

    async def make() -> Parts:
        process = EngineProcess(config, timeout_s=config.server.engine_timeout_s, progress=say)
        return await parts(process, registry)

    return lambda: AsyncLLM.from_parts(make)


def _conclude(results: Results, total: int) -> int:
    results.sort()
    wrong = len(results.errors)
    say(f"{total} requests answered" + (f", {wrong} of them with an error" if wrong else ""))
    return 1 if wrong else 0


class Batch:
    """One run over the requests that have no result yet."""

    def __init__(self, path: Path, results: Results, limit: int | None = None) -> None:
        self._path, self._results, self._limit = path, results, limit
        self._run_id = uuid.uuid4().hex[:12]
        self._numbers = itertools.count()
        self._stopped = False

    async def run(
        self,
        make: Callable[[], AsyncLLM],
        config: ServiceConfig,
        make_parsers: Callable[[], AnswerParsers] = AnswerParsers,
    ) -> int:
        """0: every request has a result now; 130: interrupted. Raises what the start of the engine
        raises, and `EngineDeadError`."""
        # Nobody else sends requests: waiting here is not overload.
        unbounded = {"max_queued_requests": None, "max_queued_tokens": None}
        server = config.server.model_copy(update=unbounded)
        config = config.model_copy(update={"server": server})
        app = create_app(make(), config, make_parsers=make_parsers)
        work = asyncio.ensure_future(self._work(app, config))

        def stop() -> None:
            self._stopped = True
            work.cancel()

        with on_signals(stop, lambda: os._exit(INTERRUPTED)):
            try:
                await work
            except asyncio.CancelledError:
                if not self._stopped:
                    raise
                left = len(self._results.missing())
                say(f"interrupted: {left} requests are left; the same command continues")
                return INTERRUPTED
        return 0

    async def _work(self, app: Starlette, config: ServiceConfig) -> None:
        async with app.router.lifespan_context(app):
            state: ServerState = app.state.server
            await state.started.wait()
            if isinstance(state.failure, OctavoError):
                raise state.failure
            if state.failure is not None:
                raise EngineDeadError(f"the engine did not start: {state.failure}")
            limit = self._limit or 2 * config.scheduler.max_num_seqs
            missing = self._results.missing()
            done = self._results.num_answered
            with self._path.open("rb") as file, _bar(done, done + len(missing)) as advance:
                async for _ in self._answered(app, file, missing, limit):
                    advance()

    async def _answered(
        self, app: Starlette, file: BinaryIO, missing: list[BatchRequest], limit: int
    ) -> AsyncIterator[None]:
        """Keep `limit` requests under way; one item a result that was written."""
        waiting = iter(missing)
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                for request in itertools.islice(waiting, limit - len(running)):
                    body = read_body(file, request)
                    running.add(asyncio.create_task(self._answer(app, request, body)))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                    yield
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, app: Starlette, request: BatchRequest, body: bytes) -> None:
        status, headers, answer = await ask(app, request.url, body)
        state: ServerState = app.state.server
        if status >= 500 and state.llm.dead_reason is not None:
            raise EngineDeadError(f"the engine has stopped: {state.llm.dead_reason}")
        number = f"batch_req_{self._run_id}-{next(self._numbers)}"
        request_id = headers.get(b"x-request-id", number.encode()).decode("latin-1")
        line = line_of(request.custom_id, number, status, request_id, msgspec.Raw(answer))
        self._results.write(request.custom_id, status, line)


class _Stream(msgspec.Struct):
    stream: Any = None


async def ask(app: Starlette, path: str, body: bytes) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request to the application: status, headers and body of its answer."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        if msgspec.json.decode(body, type=_Stream).stream not in (None, False):
            refusal = ApiError(
                "the results of a batch are no streams",
                param="stream",
                code="unsupported_parameter",
            )
            return refusal.status, {}, msgspec.json.encode(refusal.body())
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json")],
        "client": None,
        "server": None,
    }
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])
    messages: list[Any] = []

    async def receive() -> Any:
        message = next(incoming, None)
        if message is None:  # this client never leaves
            await asyncio.Event().wait()
        return message

    async def send(message: Any) -> None:
        messages.append(message)

    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in messages)
    return messages[0]["status"], dict(messages[0]["headers"]), content


@contextlib.contextmanager
def _bar(done: int, total: int) -> Iterator[Callable[[], Any]]:
    """A progress bar on a terminal, a line every ten percent elsewhere."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        with tqdm(total=total, initial=done, unit="req", dynamic_ncols=True) as bar:
            yield bar.update
        return
    count = itertools.count(done + 1)

    def advance() -> None:
        now = next(count)
        if now * 10 // total > (now - 1) * 10 // total:
            say(f"{now} of {total} requests answered")

    yield advance
