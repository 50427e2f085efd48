"""`EngineClient`: how a front end talks to an engine, wherever the engine runs.

`InlineClient` steps the engine in the calling thread (`LLM`). `ThreadClient` runs it in a thread of
its own and hands outputs over to an asyncio loop (`AsyncLLM`, the server).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol

from octavo.core.errors import EngineDeadError, PluginFault, RequestError
from octavo.core.messages import EngineOutputs, EngineRequest, Finish, only_finished, refused

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """What a client needs of an `EngineCore`: single-threaded, all calls from one thread."""

    report: Any

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, handles: Sequence[int], reason: str = "abort") -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> EngineOutputs | None: ...
    def metrics(self) -> dict[str, Any]: ...
    def reset_prefix_cache(self) -> bool: ...
    def query(self, name: str, *args: Any) -> Any: ...
    def close(self) -> None: ...


class EngineClient(ABC):
    """Requests in, outputs out.

    dead_reason: None while the engine lives; then every call raises `EngineDeadError` with it.
    """

    dead_reason: str | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the engine can take requests."""
        return self.dead_reason is None

    def check_alive(self) -> None:
        """Raise `EngineDeadError`, with the reason, when the engine has stopped."""
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)

    @abstractmethod
    def add(self, requests: Sequence[EngineRequest]) -> None:
        """Submit sequences, parents before their children. One that the engine refuses raises
        `RequestError` where the engine is in this thread, else it ends with an `error` finish."""

    @abstractmethod
    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        """End sequences; unknown and ended handles are ignored. reason: `abort`, or `stop` for
        those whose text has come to a stop string."""

    @abstractmethod
    def call(self, name: str, *args: Any) -> Future[Any]:
        """Call a method of the engine (`metrics`, `reset_prefix_cache`) in the engine's thread."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine and wait until it has stopped. More than one call is harmless."""


class AsyncEngineClient(EngineClient):
    """A client that pushes outputs into an asyncio loop."""

    report: Any = None

    @abstractmethod
    async def start(
        self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        """Start the engine and wait until it can take requests; raises what its start raises.

        Both callbacks run in the loop that called this: `on_outputs` once for every step that
        produced something, `on_death`, with the reason, whenever the engine stops by itself.
        Where an engine is started again, `dead_reason` is None from then on.
        """


class InlineClient(EngineClient):
    """The engine in the calling thread: it moves only while `step` runs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._closed = False

    @property
    def engine(self) -> Engine:
        """The engine itself."""
        return self._engine

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.check_alive()
        with self._watched(harmless=RequestError):
            for request in requests:
                self._engine.add(request)

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        if handles and self.is_alive:
            with self._watched():
                self._engine.abort(handles, reason)

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self.is_alive and self._engine.has_work()

    def step(self) -> EngineOutputs | None:
        """Advance the engine by one step."""
        self.check_alive()
        with self._watched():
            return self._engine.step()

    def call(self, name: str, *args: Any) -> Future[Any]:
        self.check_alive()
        future: Future[Any] = Future()
        _answer(self._engine, name, args, future)
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.dead_reason = self.dead_reason or "the engine was closed"
            self._engine.close()

    @contextlib.contextmanager
    def _watched(self, harmless: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Whatever is raised, but for `harmless`, leaves the engine in an unknown state."""
        try:
            yield
        except harmless:
            raise
        except BaseException as error:
            self.dead_reason = _reason(error)
            if isinstance(error, Exception):
                raise EngineDeadError(self.dead_reason) from error
            raise


class ThreadClient(AsyncEngineClient):
    """The engine, built and run in a thread of this process.

    factory: builds the engine; it is called in the engine's thread. The thread sleeps on its inbox
    while the engine has nothing to do, and empties it before every step otherwise.
    """

    def __init__(self, factory: Callable[[], Engine], *, name: str = "octavo-engine") -> None:
        self._factory = factory
        self._inbox: queue.SimpleQueue[Callable[[Engine], None] | None] = queue.SimpleQueue()
        # A daemon: an interpreter whose owner forgot to close it still exits.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._ready: Future[Any] = Future()
        self._calls: set[Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: Callable[[EngineOutputs], None] = _ignore
        self._on_death: Callable[[str], None] = _ignore

    async def start(
        self, on_outputs: Callable[[EngineOutputs], None], on_death: Callable[[str], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_outputs, self._on_death = on_outputs, on_death
        self._thread.start()
        self.report = await asyncio.wrap_future(self._ready)

    def add(self, requests: Sequence[EngineRequest]) -> None:
        self.check_alive()
        self._inbox.put(lambda engine: self._deliver(only_finished(_add(engine, requests))))

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        if handles and self.is_alive:
            self._inbox.put(lambda engine: engine.abort(handles, reason))

    def call(self, name: str, *args: Any) -> Future[Any]:
        self.check_alive()
        future: Future[Any] = Future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(lambda engine: _answer(engine, name, args, future))
        if not self.is_alive:  # it died meanwhile: nobody reads the inbox any more
            self._fail_calls()
        return future

    def close(self) -> None:
        self.dead_reason = self.dead_reason or "the engine was closed"
        self._inbox.put(None)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._fail_calls()

    # ---- in the engine's thread ------------------------------------------------------------------

    def _run(self) -> None:
        self._ready.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it
        try:
            engine = self._factory()
        except BaseException as error:  # the thread ends here: whoever waits gets it all
            self.dead_reason = _reason(error)
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine.report)
        try:
            self._serve(engine)
        except BaseException as error:
            self.dead_reason = _reason(error)
            logger.exception("the engine stopped")
            self._post(self._on_death, self.dead_reason)
        finally:
            self._fail_calls()
            with contextlib.suppress(Exception):
                engine.close()

    def _serve(self, engine: Engine) -> None:
        """Inbox, step, inbox, step: until `None` comes."""
        while True:
            if not engine.has_work():
                command = self._inbox.get()
                if command is None:
                    return
                command(engine)
            while not self._inbox.empty():
                command = self._inbox.get()
                if command is None:
                    return
                command(engine)
            if engine.has_work():
                self._deliver(engine.step())

    def _deliver(self, outputs: EngineOutputs | None) -> None:
        if outputs is not None and _has_news(outputs):
            self._post(self._on_outputs, outputs)

    def _post(self, callback: Callable[[Any], None], value: Any) -> None:
        assert self._loop is not None, "outputs before start"
        # A closed loop has no reader left; `close` is on its way.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, value)

    def _fail_calls(self) -> None:
        for future in list(self._calls):
            with contextlib.suppress(InvalidStateError):
                future.set_exception(EngineDeadError(self.dead_reason or "the engine was closed"))


def _add(engine: Engine, requests: Sequence[EngineRequest]) -> list[Finish]:
    """Queue requests; those that the engine refuses come back as finished with an error."""
    ended = []
    for request in requests:
        try:
            engine.add(request)
        except RequestError as error:
            ended.append(refused(request.handle, error))
    return ended


def _answer(engine: Engine, name: str, args: Sequence[Any], future: Future[Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return  # the asker has gone
    try:
        result = getattr(engine, name)(*args)
    except Exception as error:  # a failed question is the asker's alone
        future.set_exception(error)
    else:
        future.set_result(result)


def _has_news(outputs: EngineOutputs) -> bool:
    return bool(
        len(outputs.handles) or outputs.finished or outputs.cached or outputs.prompt_logprobs
    )


def _reason(error: BaseException) -> str:
    if isinstance(error, PluginFault):  # the plugin's name comes first
        return f"{error}; the engine stopped"
    return f"the engine stopped: {type(error).__name__}: {error}"


def _ignore(_: Any) -> None:
    """Before `start`, nobody listens."""
