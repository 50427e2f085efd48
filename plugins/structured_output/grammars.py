"""`Grammars`: where requests with structured output wait for their grammar, and where it is kept.

A request is not queued for a slot before its grammar is there. Requests with equal specifications
share one compilation and one grammar; a grammar that no request uses stays in a cache, least
recently used first to go.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from octavo.core.contracts.grammar_engine import Grammar
from octavo.core.errors import RequestError
from octavo.core.messages import EngineRequest
from octavo.core.structured_outputs import PARAM, StructuredOutputsParams
from octavo.plugins.structured_output.compiler import GrammarCompiler, Result

logger = logging.getLogger(__name__)

REMEMBERED_S = 60.0
"""How long a specification that was refused is refused again without being compiled."""

MAX_REMEMBERED = 256

Arrived = tuple[EngineRequest, RequestError | None]
"""A request that waits no longer, and why it cannot run."""


@dataclass(slots=True)
class _Kept:
    """A grammar, its size in bytes, and the live requests that use it."""

    grammar: Grammar
    size: int
    users: set[int] = field(default_factory=set)


class Grammars:
    """All calls come from the engine's thread.

    compiler: None where there is no grammar engine; `refusal` then says why. cache_bytes: for
    grammars without users.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        *,
        cache_bytes: int = 256 * 2**20,
        refusal: str = "structured output is not available: no grammar engine is in use",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._compiler, self._refusal = compiler, refusal
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._waiting: dict[StructuredOutputsParams, list[EngineRequest]] = {}
        self._arrived: deque[Arrived] = deque()
        self._kept: OrderedDict[StructuredOutputsParams, _Kept] = OrderedDict()
        self._users: dict[int, StructuredOutputsParams] = {}
        self._refused: OrderedDict[StructuredOutputsParams, tuple[float, str]] = OrderedDict()
        self._unused_bytes = 0
        self.pending = 0

    # ---- arrival ---------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        """Take a request that needs a grammar. `take` gives it back when the grammar is there.

        pending: how many requests have been taken and not given back. Raises `RequestError` where
        structured output is not available.
        """
        spec = request.sampling.structured_outputs
        assert spec is not None, "only requests with structured output come here"
        if self._compiler is None:
            raise RequestError(self._refusal, param=PARAM)
        if request.handle in self._users:
            raise RequestError(f"handle {request.handle} is in use", param="handle")
        self._users[request.handle] = spec
        self.pending += 1
        if spec in self._waiting:
            self._waiting[spec].append(request)
        elif spec in self._kept:
            self._use(self._kept[spec], request.handle)
            self._arrived.append((request, None))
        elif (refusal := self._remembered(spec)) is not None:
            self._arrived.append((request, RequestError(refusal, param=PARAM)))
        else:
            self._waiting[spec] = [request]
            self._compiler.submit(spec)

    def take(self, wait_s: float = 0.0) -> list[Arrived]:
        """The requests whose grammar has come or was refused, in order of arrival where one grammar
        serves several. wait_s: how long to wait for the first."""
        compiler = self._compiler
        if compiler is not None and self._waiting:
            wait = wait_s if not self._arrived else 0.0
            try:
                self._receive(compiler.results.get(wait > 0, wait or None))
                while True:
                    self._receive(compiler.results.get_nowait())
            except queue.Empty:
                pass
        arrived, self._arrived = list(self._arrived), deque()
        self.pending -= len(arrived)
        for request, refusal in arrived:
            if refusal is not None:
                self._users.pop(request.handle, None)
        return arrived

    def abort(self, handles: Iterable[int]) -> list[int]:
        """Forget those of these requests that wait here, and return their handles."""
        if not self.pending:
            return []
        handles, gone = set(handles), []
        for spec in {self._users[handle] for handle in handles if handle in self._users}:
            waiting = self._waiting.get(spec, [])
            kept = [request for request in waiting if request.handle not in handles]
            gone += [request.handle for request in waiting if request.handle in handles]
            if waiting:
                self._waiting[spec] = kept
                if not kept and self._compiler is not None:
                    self._compiler.drop(spec)  # else who leaves would hold up who comes
        for item in [item for item in self._arrived if item[0].handle in handles]:
            self._arrived.remove(item)
            gone.append(item[0].handle)
        for handle in gone:
            self.forget(handle)
        self.pending -= len(gone)
        return gone

    # ---- life ------------------------------------------------------------------------------------

    def of(self, handle: int) -> Grammar:
        """The grammar of a request that was given back by `take` without an error."""
        return self._kept[self._users[handle]].grammar

    def forget(self, handle: int) -> None:
        """A request has ended. Harmless for one that never was here."""
        spec = self._users.pop(handle, None)
        kept = None if spec is None else self._kept.get(spec)
        if spec is None or kept is None:
            return
        kept.users.discard(handle)
        if not kept.users:
            self._kept.move_to_end(spec)
            self._unused_bytes += kept.size
            self._evict()

    def preload(self) -> None:
        """Start what compiles, before the first request needs it."""
        if self._compiler is not None:
            self._compiler.preload()

    def close(self) -> None:
        """Stop what compiles. More than one call is harmless."""
        if self._compiler is not None:
            self._compiler.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _receive(self, result: Result) -> None:
        waiting = self._waiting.pop(result.spec)
        if result.dropped:
            if waiting and self._compiler is not None:  # somebody has asked since
                self._waiting[result.spec] = waiting
                self._compiler.submit(result.spec)
            return
        if result.grammar is None:
            message = result.error or "the grammar engine gave no reason"
            if result.fault:
                logger.error("%s", message)
            else:
                self._refused[result.spec] = (self._clock() + REMEMBERED_S, message)
            while len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)
            refusal = RequestError(message, param=PARAM)
            self._arrived.extend((request, refusal) for request in waiting)
            return
        kept = self._kept[result.spec] = _Kept(result.grammar, result.size)
        self._unused_bytes += kept.size
        for request in waiting:
            self._use(kept, request.handle)
        self._arrived.extend((request, None) for request in waiting)
        self._evict()

    def _use(self, kept: _Kept, handle: int) -> None:
        if not kept.users:
            self._unused_bytes -= kept.size
        kept.users.add(handle)

    def _evict(self) -> None:
        if self._unused_bytes <= self._cache_bytes:
            return
        for spec, kept in list(self._kept.items()):
            if not kept.users:
                del self._kept[spec]
                self._unused_bytes -= kept.size
                if self._unused_bytes <= self._cache_bytes:
                    return

    def _remembered(self, spec: StructuredOutputsParams) -> str | None:
        until, message = self._refused.get(spec, (0.0, ""))
        if until > self._clock():
            return message
        self._refused.pop(spec, None)
        return None
