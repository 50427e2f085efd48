"""`Mailbox`: outputs of one request on their way to a reader who may be slow."""

from __future__ import annotations

import asyncio
from collections import deque

from octavo.core.errors import OctavoError
from octavo.frontend.outputs import RequestOutput

_MAX_BEHIND = 8
"""Deltas that a reader may be behind before later ones are merged."""


class Mailbox:
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
