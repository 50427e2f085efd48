"""`Call`, one request of a workload, and `Dispatcher`, which says when each may be sent."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city community
name president team minute idea body information back parent face others level office door health
person art war history party result change morning reason research girl guy moment air teacher force
"""
_WORDS = _TEXT.split()


@dataclass(frozen=True)
class Call:
    """One request. Its prompt is token ids, a text or messages (one of the three).

    max_tokens: generated, exactly so many. arrival: seconds from the begin. after: index of the
    call that must have ended first, and delay: seconds from that end (the later of both counts).
    """

    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    arrival: float = 0.0
    after: int | None = None
    delay: float = 0.0
    user: str | None = None
    priority: int = 0

    @property
    def as_text(self) -> str:
        """The prompt as text; token ids become words, equal ids equal words."""
        if self.text is not None:
            return self.text
        if self.token_ids is not None:
            return " ".join(map(_word, self.token_ids))
        return "\n".join(str(message.get("content", "")) for message in self.messages or ())


def _word(token: int) -> str:
    """A common word for most ids, so that a word is about a token; a number behind it keeps the
    texts of different ids apart."""
    word = _WORDS[token % len(_WORDS)]
    return word if token % 7 else f"{word} {token % 1000}"


class Dispatcher:
    """Follows a run: what is due, what is under way, when to look again.

    max_concurrency: requests under way at once; None: no limit. `due_at[i]` is when call i was due:
    with a limit, when it was let in.
    """

    def __init__(self, calls: Sequence[Call], max_concurrency: int | None = None) -> None:
        self.due_at = [0.0] * len(calls)
        self.num_running = 0
        self.num_left = len(calls)
        self._calls, self._limit = calls, max_concurrency
        self._followers: dict[int, list[int]] = {}
        self._ready: list[tuple[float, int]] = []
        for index, call in enumerate(calls):
            if call.after is None:
                heapq.heappush(self._ready, (call.arrival, index))
            else:
                assert call.after < index, "a call follows an earlier one"
                self._followers.setdefault(call.after, []).append(index)

    @property
    def done(self) -> bool:
        """Whether every call has ended."""
        return not self.num_left

    def due(self, now: float) -> list[int]:
        """Calls to be sent now, counted as under way from here on."""
        found = []
        while self._ready and self._ready[0][0] <= now and self._has_room():
            moment, index = heapq.heappop(self._ready)
            self.due_at[index] = moment if self._limit is None else now
            self.num_running += 1
            found.append(index)
        return found

    def _has_room(self) -> bool:
        return self._limit is None or self.num_running < self._limit

    def next_time(self) -> float | None:
        """When the next call is due by time alone; None: only the end of another one helps."""
        return self._ready[0][0] if self._ready and self._has_room() else None

    def ended(self, index: int, now: float) -> None:
        """A call has ended, whatever came of it."""
        self.num_running -= 1
        self.num_left -= 1
        for follower in self._followers.pop(index, ()):
            call = self._calls[follower]
            heapq.heappush(self._ready, (max(call.arrival, now + call.delay), follower))
