"""`AsyncLLM`: an engine in its own thread, for asyncio programs and the server."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import EngineDeadError, OctavoError, RequestError, failure
from octavo.core.messages import EngineOutputs
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.async_engine import AsyncEngine, Parts
from octavo.frontend.client import AsyncEngineClient, ThreadClient
from octavo.frontend.outputs import RequestOutput
from octavo.frontend.text.chat import Conversation, chat_prompt, chat_text
from octavo.frontend.text.inputs import InputProcessor, PreparedRequest, Prompt
from octavo.frontend.text.output_processor import OutputMode

if TYPE_CHECKING:
    from octavo.engine.config import EngineConfig
    from octavo.frontend.assembly import ConfigSource

R = TypeVar("R")

logger = logging.getLogger(__name__)

_INLINE_CHARACTERS = 4096
"""A prompt up to this long is tokenized faster than it is handed to a thread."""

_MAX_BEHIND = 8
"""Deltas that a reader may be behind before later ones are merged."""


class AsyncLLM(AsyncEngine):
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
            from octavo.engine.tokenizer import make_tokenizer
            from octavo.frontend import assembly

            named = tokenizer if isinstance(tokenizer, str) else None
            settings, registry = assembly.configure(
                model, config=config, plugins=plugins, tokenizer=named, keywords=keywords
            )
            resolved = resolve(settings, registry)
            loaded = tokenizer
            if not isinstance(loaded, Tokenizer):
                loaded = make_tokenizer(resolved, registry)
            client = ThreadClient(lambda: assembly.build(resolved, registry, progress, loaded))
            return client, assembly.make_inputs(resolved, loaded)

        self._set_up(lambda: self._in_pool(parts))

    @classmethod
    def from_client(cls, client: AsyncEngineClient, inputs: InputProcessor) -> Self:
        """Around an engine client made by hand."""

        async def parts() -> Parts:
            return client, inputs

        return cls.from_parts(parts)

    @classmethod
    def from_parts(cls, parts: Callable[[], Awaitable[Parts]]) -> Self:
        """Around what `parts` makes when the engine is to start. Where it raises, it has stopped
        what it had begun."""
        self = cls.__new__(cls)
        self._set_up(parts)
        return self

    def _set_up(self, parts: Callable[[], Awaitable[Parts]]) -> None:
        super().__init__(parts)
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ids = itertools.count()

    # ---- generation ------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete a prompt; every output holds all so far, the last one has `finished`.

        prompt: or what `inputs.prepare` has made of one, with all that the other arguments say.
        Raises at the first item: `RequestError` for an invalid prompt or a request_id that is live,
        `EngineDeadError`. A request that fails while it runs raises `RequestError`. Leaving the
        loop, or cancelling the task, aborts the request.
        """
        return self._run(
            "cumulative",
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )

    def stream(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `generate`, but every output holds only what is new since the one before."""
        return self._run(
            "delta",
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        )

    async def complete(
        self,
        prompt: Prompt | PreparedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        user: str | None = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        """As `generate`, but only the last output: nothing is made for the steps between."""
        async for output in self._run(
            "final",
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            user=user,
            cache_salt=cache_salt,
        ):
            if output.finished:
                return output
        raise EngineDeadError("the request ended without an output")

    async def abort(self, request_id: str) -> None:
        """End a request; its reader gets a last output with finish_reason `abort`. An unknown
        request_id is ignored."""
        mailbox = self._mailboxes.get(request_id)
        if mailbox is None or self._processor is None:
            return
        mailbox.aborted = True
        if (update := self._processor.abort(request_id)) is not None:
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

    # ---- requests --------------------------------------------------------------------------------

    async def _run(
        self,
        mode: OutputMode,
        prompt: Prompt | PreparedRequest,
        sampling: SamplingParams | None,
        request_id: str | None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """options: of `InputProcessor.prepare`."""
        if isinstance(prompt, PreparedRequest):
            request_id = prompt.request_id
        elif request_id is None:
            request_id = f"octavo-{next(self._ids)}"
        if request_id in self._mailboxes:
            raise RequestError(
                f"request_id '{request_id}' belongs to a request that is running",
                param="request_id",
            )
        mailbox = self._mailboxes[request_id] = _Mailbox(deltas=mode == "delta")
        try:
            await self.start()
            if isinstance(prompt, PreparedRequest):
                prepared = prompt
            else:
                given, name = prompt, request_id
                prepared = await self._tokenizing(
                    given,
                    lambda: self.inputs.prepare(given, sampling, request_id=name, **options),
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
            if self._processor is not None:
                self._processor.abort(request_id)

    def _submit(self, prepared: PreparedRequest, mode: OutputMode, mailbox: _Mailbox) -> None:
        client, processor = self._running()
        client.check_alive()
        processor.add(prepared, mode)
        if mailbox.aborted:  # while it was being tokenized
            update = processor.abort(prepared.request_id)
            assert update is not None, "an aborted request has a last output"
            mailbox.put(update)
        else:
            client.add(prepared.requests)

    def _on_outputs(self, outputs: EngineOutputs) -> None:
        """One step's outputs. Should the text side fail, every reader is told: none waits for
        outputs that were lost."""
        _, processor = self._running()
        try:
            updates = processor.process(outputs)
        except Exception as error:
            logger.exception("outputs of step %d could not be processed", outputs.step)
            reason = f"the text side failed: {type(error).__name__}: {error}"
            for mailbox in self._mailboxes.values():
                mailbox.fail(EngineDeadError(reason))
            return
        for update in updates:
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


class _Mailbox:
    """What a reader has not taken yet.

    deltas: every output counts, and a reader who is far behind gets the later ones merged into one.
    Else an output holds all so far, and only the last one is kept.
    """

    __slots__ = ("_deltas", "_error", "_event", "_updates", "aborted")

    def __init__(self, *, deltas: bool) -> None:
        self._deltas = deltas
        self._updates: deque[RequestOutput] = deque()
        self._error: OctavoError | None = None
        self._event = asyncio.Event()
        self.aborted = False
        """Whether the request was aborted, if only before the engine had it."""

    def put(self, update: RequestOutput) -> None:
        """Hand over an output."""
        updates = self._updates
        if not self._deltas:
            updates.clear()
        elif len(updates) > _MAX_BEHIND:
            updates[-1].extend(update)
            return
        updates.append(update)
        self._event.set()

    def fail(self, error: OctavoError) -> None:
        """Raise this to the reader, after what it has not taken yet."""
        self._error = error
        self._event.set()

    async def take(self) -> RequestOutput:
        """The next output, as soon as there is one. Raises what `fail` was given."""
        while not self._updates:
            if self._error is not None:
                raise self._error
            self._event.clear()
            await self._event.wait()
        return self._updates.popleft()
