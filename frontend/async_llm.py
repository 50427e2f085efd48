"""`AsyncLLM`: an engine in its own thread, for asyncio programs and the server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import EngineDeadError, OctavoError, RequestError, failure
from octavo.core.messages import EngineOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.client import AsyncEngineClient, ThreadClient
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.text.chat import Conversation, chat_prompt, chat_text
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import InputProcessor, PreparedRequest, Prompt
from octavo.frontend.text.output_processor import OutputProcessor
from octavo.frontend.text.state import OutputMode

if TYPE_CHECKING:
    from octavo.core.registry import Registry
    from octavo.engine.config import EngineConfig
    from octavo.engine.resolve import Resolved
    from octavo.frontend.assembly import ConfigSource

R = TypeVar("R")

Parts = tuple[AsyncEngineClient, InputProcessor]

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS = 4096  # a prompt up to this long is tokenized faster than handed to a thread

_BEHIND = 8  # outputs that a slow reader may be behind before they are merged


class AsyncLLM:
    """Generates text for many callers at once. Arguments as for `LLM`.

    The engine starts with `await start()`, with `async with`, or with the first request; end it
    with `await shutdown()`. All methods belong to one asyncio loop. Outputs that a slow reader has
    not taken are merged when there are many, so that it never holds up the engine.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: ConfigSource | EngineConfig | None = None,
        plugins: Iterable[Any] = (),
        tokenizer: str | Tokenizer | None = None,
        progress: Callable[[str], None] | None = None,
        **keywords: Any,
    ) -> None:
        def parts() -> Parts:
            from octavo.engine.resolve import resolve
            from octavo.frontend import assembly

            named = tokenizer if isinstance(tokenizer, str) else None
            settings, registry = assembly.configure(
                model, config=config, plugins=plugins, tokenizer=named, keywords=keywords
            )
            given = tokenizer if isinstance(tokenizer, Tokenizer) else None
            return _parts(resolve(settings, registry), registry, given, progress)

        self._set_up(parts)

    @classmethod
    def from_resolved(
        cls,
        resolved: Resolved,
        registry: Registry,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> Self:
        """From a configuration that is resolved already."""
        self = cls.__new__(cls)
        self._set_up(lambda: _parts(resolved, registry, None, progress))
        return self

    @classmethod
    def from_client(cls, client: AsyncEngineClient, inputs: InputProcessor) -> Self:
        """Around an engine client made by hand."""
        self = cls.__new__(cls)
        self._set_up(lambda: (client, inputs))
        return self

    @classmethod
    def from_parts(cls, parts: Callable[[], Awaitable[Parts]]) -> Self:
        """Around a client that `parts` makes when the engine is to start, with what the text side
        needs. Where it raises, it has stopped what it had begun."""
        self = cls.__new__(cls)
        self._set_up_async(parts)
        return self

    def _set_up(self, parts: Callable[[], Parts]) -> None:
        self._set_up_async(lambda: self._in_pool(parts))

    def _set_up_async(self, parts: Callable[[], Awaitable[Parts]]) -> None:
        self._parts = parts
        self._pool = ThreadPoolExecutor(2, "octavo-text")
        self._starting: asyncio.Task[None] | None = None
        self._ready = False
        self._client: AsyncEngineClient | None = None
        self._inputs: InputProcessor | None = None
        self._processor: OutputProcessor | None = None
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ids = itertools.count()
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
        self._processor = OutputProcessor(table)
        await client.start(self._on_outputs, self._on_death)
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

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete a prompt; every output holds all so far, the last one has `finished`.

        Raises at the first item: `RequestError` for an invalid prompt or a request_id that is live,
        `EngineDeadError`. A request that fails while it runs raises `RequestError`. Leaving the
        loop, or cancelling the task, aborts the request.
        """
        options = _Options(priority, user, cache_salt)
        return self._run("cumulative", prompt, sampling_params, request_id, options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, but every output holds only what is new since the one before."""
        options = _Options(priority, user, cache_salt)
        return self._run("delta", prompt, sampling_params, request_id, options)

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """As `generate`, but only the last output: nothing is made for the steps between."""
        options = _Options(priority, user, cache_salt)
        async for output in self._run("final", prompt, sampling_params, request_id, options):
            if output.finished:
                return output
        raise EngineDeadError("the request ended without an output")

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish_reason `abort`. An unknown
        request_id is ignored."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None or self._processor is None or self._client is None:
            return
        mailbox.aborted = True
        handles, update = self._processor.abort(request_id)
        self._client.abort(handles)
        if update is not None:
            mailbox.put(update)

    async def render_chat(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A prompt for `generate` (with `prompt` and `prompt_token_ids`) from a conversation."""
        text = await self.chat_text(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return await self._in_pool(lambda: chat_prompt(self.inputs, text))

    async def chat_text(
        self,
        messages: Conversation,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """As `render_chat`: the text alone, not tokenized, of any length."""
        await self.start()
        return await self._in_pool(
            lambda: chat_text(
                self.tokenizer,
                messages,
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
        )

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        await self.start()
        return await self._tokenizing(
            text, lambda: self.inputs.encode(text, add_special_tokens=add_special_tokens)
        )

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
        report = self.report
        return self.max_model_len if report is None else int(report.max_sequence_tokens)

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

    # ---- requests --------------------------------------------------------------------------------

    async def _run(
        self,
        mode: OutputMode,
        prompt: Prompt,
        sampling: SamplingParams | None,
        request_id: str | None,
        options: _Options,
    ) -> AsyncIterator[RequestOutput]:
        if request_id is None:
            request_id = f"octavo-{next(self._ids)}"
        if request_id in self._mailboxes:
            raise RequestError(
                f"request_id '{request_id}' belongs to a request that is running",
                param="request_id",
            )
        mailbox = self._mailboxes[request_id] = _Mailbox(merge=mode == "delta")
        try:
            await self.start()
            prepared = await self._tokenizing(
                prompt,
                lambda: self.inputs.prepare(
                    prompt,
                    sampling,
                    request_id=request_id,
                    priority=options.priority,
                    user=options.user,
                    cache_salt=options.cache_salt,
                ),
            )
            self._submit(prepared, mode, mailbox)
            while True:
                update = await mailbox.take()
                if update.error is not None:
                    raise failure(update.error, update.error_param, update.error_code)
                if update.finished and prepared.sampling.timeline:
                    update.timeline = await self.timeline(request_id)
                yield update
                if update.finished:
                    return
        finally:
            del self._mailboxes[request_id]
            self._forget(request_id)

    def _submit(self, prepared: PreparedRequest, mode: OutputMode, mailbox: _Mailbox) -> None:
        client, processor = self._running()
        client.check_alive()
        processor.add(prepared, mode)
        if mailbox.aborted:  # while it was being tokenized
            _, update = processor.abort(prepared.request_id)
            assert update is not None, "an aborted request has a last output"
            mailbox.put(update)
        else:
            client.add(prepared.requests)

    def _running(self) -> tuple[AsyncEngineClient, OutputProcessor]:
        assert self._client is not None, "start comes first"
        assert self._processor is not None, "start comes first"
        return self._client, self._processor

    def _forget(self, request_id: str) -> None:
        if self._processor is not None and self._client is not None:
            handles, _ = self._processor.abort(request_id)
            self._client.abort(handles)

    def _on_outputs(self, outputs: EngineOutputs) -> None:
        """One step's outputs. Should the text side fail, every reader is told: none waits for
        outputs that were lost."""
        client, processor = self._running()
        try:
            processed = processor.process(outputs)
        except Exception as error:
            logger.exception("outputs of step %d could not be processed", outputs.step)
            reason = f"the text side failed: {type(error).__name__}: {error}"
            for mailbox in self._mailboxes.values():
                mailbox.fail(EngineDeadError(reason))
            return
        client.abort(processed.stops, "stop")
        client.abort(processed.aborts)
        for update in processed.updates:
            if update.request_id in self._mailboxes:
                self._mailboxes[update.request_id].put(update)

    def _on_death(self, reason: str) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineDeadError(reason))

    async def _tokenizing(self, prompt: Any, work: Callable[[], R]) -> R:
        """Run `work`, which tokenizes this prompt: here when it is short, else in a thread."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(text, str) and len(text) > _INLINE_CHARACTERS:
            return await self._in_pool(work)
        return work()

    async def _in_pool(self, work: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class _Options(NamedTuple):
    """What a caller says of a request beside prompt and sampling."""

    priority: int
    user: str | None
    cache_salt: str | None


class _Mailbox:
    """What a reader has not taken yet. merge: outputs are deltas; a reader who is more than
    `_BEHIND` of them behind gets the later ones merged into one. Else only the last one counts."""

    __slots__ = ("_error", "_event", "_merge", "_updates", "aborted")

    def __init__(self, *, merge: bool) -> None:
        self._merge = merge
        self._updates: deque[RequestOutput] = deque()
        self._error: OctavoError | None = None
        self._event = asyncio.Event()
        self.aborted = False

    def put(self, update: RequestOutput) -> None:
        updates = self._updates
        if not self._merge:
            updates.clear()
        elif len(updates) > _BEHIND:
            updates[-1].extend(update)
            return
        updates.append(update)
        self._event.set()

    def fail(self, error: OctavoError) -> None:
        """Raise this to the reader, after what it has not taken yet."""
        self._error = error
        self._event.set()

    async def take(self) -> RequestOutput:
        while not self._updates:
            if self._error is not None:
                raise self._error
            self._event.clear()
            await self._event.wait()
        return self._updates.popleft()


def _parts(
    resolved: Resolved,
    registry: Registry,
    tokenizer: Tokenizer | None,
    progress: Callable[[str], None] | None,
) -> Parts:
    """The client of an engine that is yet to be built, and the text side's part."""
    from octavo.engine.tokenizer import make_tokenizer
    from octavo.frontend import assembly

    tokenizer = tokenizer or make_tokenizer(resolved, registry)
    client = ThreadClient(lambda: assembly.build(resolved, registry, progress, tokenizer))
    parsers = assembly.make_parsers(resolved.config, registry)
    return client, assembly.make_inputs(resolved, tokenizer, parsers)
