"""`AsyncEngine`: the life of an engine beside an asyncio loop, and what is known of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import EngineDeadError
from octavo.core.messages import EngineOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.client import AsyncEngineClient
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import InputProcessor
from octavo.frontend.text.output_processor import OutputProcessor

R = TypeVar("R")

Parts = tuple[AsyncEngineClient, InputProcessor]
"""What an `AsyncEngine` is made of."""


class AsyncEngine(ABC):
    """Starts the engine when it is needed, stops it, and answers questions about it.

    parts: makes client and input processor when the engine is to start. Where it raises, it has
    stopped what it had begun.
    """

    def __init__(self, parts: Callable[[], Awaitable[Parts]]) -> None:
        self._parts = parts
        self._pool = ThreadPoolExecutor(2, "octavo-text")
        self._starting: asyncio.Task[None] | None = None
        self._ready = False
        self._client: AsyncEngineClient | None = None
        self._inputs: InputProcessor | None = None
        self._processor: OutputProcessor | None = None
        self._closed = False

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Start the engine and wait until it can take requests. Raises what the start raises; calls
        after the first wait for the same start."""
        if self._closed:
            raise EngineDeadError("the engine was closed")
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="octavo-start")
        await asyncio.shield(self._starting)
        return self

    async def _start(self) -> None:
        client, inputs = await self._parts()
        self._client, self._inputs = client, inputs
        table = TokenTable(inputs.tokenizer)
        await self._in_pool(lambda: table.joins_bytes)  # takes some milliseconds, once
        self._processor = OutputProcessor(table, client.abort)
        await client.start(self._on_outputs, self._on_death)
        if client.report is not None:
            inputs.max_sequence_tokens = client.report.max_sequence_tokens
        self._ready = True

    async def shutdown(self) -> None:
        """Stop the engine; running requests fail with `EngineDeadError`. Harmless when repeated."""
        self._closed = True
        self._ready = False
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.wait([self._starting])
        await asyncio.to_thread(self._stop)
        self._on_death("the engine was closed")

    def _stop(self) -> None:
        if self._client is not None:
            self._client.close()
        self._pool.shutdown(wait=True)

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.shutdown()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    @property
    def is_ready(self) -> bool:
        """Whether a request sent now would be answered."""
        return self._ready and self._client is not None and self._client.is_alive

    @property
    def dead_reason(self) -> str | None:
        """Why the engine answers nothing more; None while it starts or lives."""
        if self._closed:
            return "the engine was closed"
        return None if self._client is None else self._client.dead_reason

    async def check_health(self) -> None:
        """Raise `EngineDeadError` when the engine has stopped or has not started yet."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)
        if not self._ready:
            raise EngineDeadError("the engine is still starting")

    @abstractmethod
    def _on_outputs(self, outputs: EngineOutputs) -> None:
        """One step's outputs, in the loop."""

    @abstractmethod
    def _on_death(self, reason: str) -> None:
        """The engine has stopped: whoever waits for it must be told."""

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def inputs(self) -> InputProcessor:
        """The input processor; there once `start` is past reading the model's configuration."""
        if self._inputs is None:
            raise EngineDeadError("the engine is still starting")
        return self._inputs

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return self.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """Longest sequence, prompt and output, in tokens."""
        return self.inputs.max_model_len

    @property
    def max_sequence_tokens(self) -> int:
        """Longest sequence that the KV pool can hold too."""
        return self.inputs.max_sequence_tokens

    @property
    def report(self) -> Any:
        """The startup report, None before the engine has started."""
        return None if self._client is None else self._client.report

    @property
    def num_queued(self) -> int:
        """Requests that the engine has not begun."""
        return 0 if self._processor is None else self._processor.num_queued

    @property
    def num_queued_tokens(self) -> int:
        """Their prompt tokens."""
        return 0 if self._processor is None else self._processor.num_queued_tokens

    async def get_tokenizer(self) -> Tokenizer:
        """The tokenizer, after waiting for the start."""
        await self.start()
        return self.tokenizer

    def default_sampling_params(self) -> SamplingParams:
        """What `sampling_params=None` means for this model."""
        return self.inputs.default_sampling_params()

    async def metrics(self) -> dict[str, Any]:
        """Times of the phases of a step, and the scheduler's state."""
        metrics: dict[str, Any] = await self._call("metrics")
        return metrics

    async def overview(self, cells: int = 1024, requests: int = 32) -> dict[str, Any]:
        """KV blocks, live and recent requests, for people; see docs/metrics.md."""
        seen: dict[str, Any] = await self._call("query", "overview", cells, requests)
        return seen

    async def timeline(self, request_id: str) -> list[dict[str, Any]] | None:
        """What happened to a request, event by event; None when nothing was recorded of it."""
        events: list[dict[str, Any]] | None = await self._call("query", "timeline", request_id)
        return events

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prompts; False while requests run."""
        return bool(await self._call("reset_prefix_cache"))

    async def _call(self, name: str, *args: Any) -> Any:
        await self.start()
        assert self._client is not None
        return await asyncio.wrap_future(self._client.call(name, *args))

    def _running(self) -> tuple[AsyncEngineClient, OutputProcessor]:
        assert self._client is not None, "start comes first"
        assert self._processor is not None, "start comes first"
        return self._client, self._processor

    async def _in_pool(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)
