"""Refuses requests while too many wait: a queue that only grows answers nobody in time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octavo.frontend.async_llm import AsyncLLM
from octavo.server.config import ServerConfig
from octavo.server.http.errors import ApiError, unavailable


class Queue:
    """Counts what waits: requests that the engine has not begun, and those on their way to it.

    Of several API processes each has its share of the limits. on_refused is called with the limit
    (`requests`, `tokens`) whenever a request is refused.
    """

    def __init__(
        self, llm: AsyncLLM, config: ServerConfig, on_refused: Callable[[str], None]
    ) -> None:
        self._llm = llm
        self._max_requests = _share(config.max_queued_requests, config.api_workers)
        self._max_tokens = _share(config.max_queued_tokens, config.api_workers)
        self._on_refused = on_refused
        self._entering = 0
        self._entering_tokens = 0

    def enter(self) -> Place:
        """A place for a request that has come. Raises `ApiError` 503 when there is none."""
        waiting = self._llm.num_queued + self._entering
        if self._max_requests is not None and waiting >= self._max_requests:
            raise self._refuse("requests", waiting, self._max_requests)
        return Place(self)

    def _check(self, place: Place, prompts: Sequence[int]) -> None:
        """Now that a request is known to be these prompts, with so many tokens each. One for which
        nothing else waits is always taken."""
        others = self._llm.num_queued + self._entering - place.requests
        if self._max_requests is not None and 0 < others > self._max_requests - len(prompts):
            raise self._refuse("requests", others, self._max_requests)
        tokens = self._llm.num_queued_tokens + self._entering_tokens
        if self._max_tokens is not None and 0 < tokens > self._max_tokens - sum(prompts):
            raise self._refuse("tokens", tokens, self._max_tokens)

    def _refuse(self, what: str, waiting: int, limit: int) -> ApiError:
        self._on_refused(what)
        return unavailable(
            f"the server is overloaded: the queue is full, {waiting} {what} wait (limit {limit}, "
            f"server.max_queued_{what})",
            "server_overloaded",
        )


class Place:
    """A request on its way to the engine. Must be left, at the latest when it has ended."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self.requests, self._tokens = 0, 0
        self._hold(1, 0)

    def settle(self, prompts: Sequence[int]) -> None:
        """Its prompts are known, by their numbers of tokens. Raises `ApiError` 503 when they are
        too many."""
        self._queue._check(self, prompts)
        self._hold(len(prompts), sum(prompts))

    def leave(self) -> None:
        """The engine counts it from now on, or it has ended. Harmless when repeated."""
        self._hold(0, 0)

    def _hold(self, requests: int, tokens: int) -> None:
        self._queue._entering += requests - self.requests
        self._queue._entering_tokens += tokens - self._tokens
        self.requests, self._tokens = requests, tokens


def _share(limit: int | None, parts: int) -> int | None:
    return None if limit is None else -(-limit // parts)
