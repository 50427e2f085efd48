"""What the lifespan owns: the engine, its readiness, served names, counters."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from functools import partial

from octavo.core.errors import OctavoError
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.async_llm import AsyncLLM
from octavo.server.config import ServiceConfig
from octavo.server.http.errors import ApiError, unavailable
from octavo.server.http.large_body import LARGE, Threads
from octavo.server.http.overload import Queue
from octavo.server.openai.answer import AnswerParsers
from octavo.server.openai.protocol.common import ModelCard, ModelList, shown
from octavo.server.operations.metrics import Metrics
from octavo.server.templates.chats import ChatRenderers

logger = logging.getLogger("octavo.server")

STOP_S = 10
"""Seconds that the engine gets to stop."""


def served_names(config: ServiceConfig) -> list[str]:
    """Names under which clients ask for the model."""
    names = config.server.served_model_name or config.model.source or "octavo"
    return [names] if isinstance(names, str) else list(names)


class ServerState:
    """One an API process. All methods run on the event loop's thread.

    make_parsers: called once the engine has started. worker: number of this API process.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        config: ServiceConfig,
        make_parsers: Callable[[], AnswerParsers] = AnswerParsers,
        worker: int = 0,
    ) -> None:
        self.llm, self.config = llm, config
        self._make_parsers = make_parsers
        self.names = served_names(config)
        self.created = int(time.time())
        self.metrics = Metrics(llm, config, self.names[0], worker)
        self.queue = Queue(llm, config.server, self.metrics.rejected)
        self.renderers = ChatRenderers(llm, config.server)
        self.threads = Threads()
        self.in_flight = 0
        """Generations under way."""
        self.live: set[str] = set()
        """Their ids in the engine."""
        self.draining = False
        """Whether the server is stopping: what runs may finish, nothing new begins."""
        self.clean = True
        """Whether the engine stopped in time."""
        self.started = asyncio.Event()
        """Set when loading has ended, well or not."""
        self.failure: Exception | None = None
        self._ready = False
        self._counter = itertools.count()
        self._warned: set[str] = set()

    async def start(self) -> None:
        """Load the engine. Failure is kept in `failure`: /health then says why."""
        try:
            await self.llm.start()
            self.renderers.start()
            self.parsers = self._make_parsers()
            self.defaults: SamplingParams = self.llm.default_sampling_params()
            self._ready = True
        except Exception as error:
            self.failure = error
            if not isinstance(error, OctavoError):
                logger.error("the engine did not start", exc_info=error)
        finally:
            self.started.set()

    async def stop(self) -> None:
        """Stop the engine. One that does not stop in time (it is loading, or hangs) is left."""
        await self.renderers.close()
        self.threads.close()
        try:
            await asyncio.wait_for(self.llm.shutdown(), STOP_S)
        except TimeoutError:
            self.clean = False
            logger.warning("the engine did not stop within %g s", STOP_S)

    async def interrupt(self) -> None:
        """Abort what still runs, while draining: its readers get an error."""
        for request_id in list(self.live):
            await self.llm.abort(request_id)

    def require_ready(self) -> None:
        """Raises `ApiError` 503 unless a request can be answered now."""
        if self.draining:
            raise unavailable("the server is stopping", "server_stopping")
        if self.failure is not None:
            raise unavailable(f"the engine did not start: {self.failure}", "engine_dead")
        if not self._ready:
            raise unavailable("the engine is still loading", "engine_loading")
        if self.llm.dead_reason is not None:
            raise unavailable(f"the engine has stopped: {self.llm.dead_reason}", "engine_dead")

    def model_name(self, asked: str | None) -> str:
        """The served name for a request's `model`; 404 when there is none such. None, and empty as
        clients send it that must send something: the first one."""
        if not asked:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(map(repr, self.names))
            raise ApiError(
                f"the model {shown(asked)} does not exist; served here: {served}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return asked

    def models(self) -> ModelList:
        """The answer of /v1/models. max_model_len is known once the engine runs."""
        root = self.config.model.source or self.names[0]
        length = self.llm.max_model_len if self._ready else self.config.model.max_model_len
        cards = [
            ModelCard(
                id=name,
                object="model",
                created=self.created,
                owned_by="octavo",
                root=root,
                parent=None,
                max_model_len=length,
            )
            for name in self.names
        ]
        return ModelList(object="list", data=cards)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, made off the event loop."""
        encode = partial(self.llm.inputs.encode, text, add_special_tokens=add_special_tokens)
        return await self.threads.run(len(text) >= LARGE, encode)

    def answer_id(self, prefix: str, asked: str | None) -> str:
        """The `id` of an answer: the client's own name for the request, or a random one."""
        return f"{prefix}{asked or uuid.uuid4().hex}"

    def engine_id(self, answer_id: str) -> str:
        """Unique in the engine, whatever clients send as ids."""
        return f"{answer_id}-{next(self._counter)}"

    def warn_ignored(self, names: Iterable[str]) -> None:
        """Log an unknown parameter the first time that it comes."""
        for name in names:
            if name not in self._warned and len(self._warned) < 1000:
                self._warned.add(name)
                logger.warning("unknown request parameter %s is ignored", shown(name))
