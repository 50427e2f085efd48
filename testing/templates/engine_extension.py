"""Engine extension `example`: runs at most so many requests of one user at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.engine_extension import EngineExtension, EngineExtensionContext
from octavo.core.contracts.observer import RequestRecord
from octavo.core.errors import RequestError
from octavo.core.messages import EngineRequest


class ExampleOptions(Options):
    """The limit."""

    per_user: int = Field(default=8, ge=1, description="Requests of one user that run at once.")


class ExampleExtension(EngineExtension):
    """Holds the other requests of a user back, in order of arrival. Requests without a user are
    not limited. The query `held` says how many each user has waiting here."""

    def __init__(self, options: ExampleOptions, context: EngineExtensionContext) -> None:
        self._limit = options.per_user
        self._held: dict[int, EngineRequest] = {}
        self._user_of: dict[int, str] = {}  # of queued requests, by handle
        self._num_queued: Counter[str] = Counter()

    def admit(self, request: EngineRequest) -> bool:
        if request.user is None or self._num_queued[request.user] < self._limit:
            return True
        self._held[request.handle] = request
        return False

    def poll(self, wait_s: float) -> Iterable[tuple[EngineRequest, RequestError | None]]:
        # The engine queues each request before it asks for the next, so the counts are right.
        for request in list(self._held.values()):
            if request.user is None or self._num_queued[request.user] < self._limit:
                del self._held[request.handle]
                yield request, None

    def abort(self, handles: Sequence[int]) -> Iterable[int]:
        return [handle for handle in handles if self._held.pop(handle, None) is not None]

    def on_queued(self, request: EngineRequest) -> None:
        if request.user is not None:
            self._user_of[request.handle] = request.user
            self._num_queued[request.user] += 1

    def on_finished(self, record: RequestRecord) -> None:
        user = self._user_of.pop(record.handle, None)
        if user is not None:
            self._num_queued[user] -= 1
            if not self._num_queued[user]:
                del self._num_queued[user]

    def queries(self) -> Mapping[str, Callable[..., Any]]:
        return {"held": lambda: dict(Counter(str(r.user) for r in self._held.values()))}
