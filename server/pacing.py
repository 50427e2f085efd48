"""`server.stream_interval`: several tokens of a choice in one event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.server.engine import Choice, Output, TokenLogprob


@dataclass
class Piece:
    """Deltas of one choice, joined."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Choice) -> None:
        self.text += delta.text
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


@dataclass
class Paced:
    """An output with the choices that are due."""

    outputs: Sequence[Choice]
    finished: bool
    prompt_logprobs: Sequence[Mapping[int, TokenLogprob] | None] | None
    num_cached_tokens: int | None


class Pace:
    """Holds the tokens of each choice back until `interval` of them have come. The first one, which
    clients measure, and the last one do not wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], Piece] = {}
        self._begun: set[tuple[int, int]] = set()

    def take(self, prompt: int, output: Output) -> Output:
        """What is due now that this output has come."""
        if self._interval == 1:
            return output
        due = [piece for choice in output.outputs if (piece := self._due(prompt, choice))]
        return Paced(due, output.finished, output.prompt_logprobs, output.num_cached_tokens)

    def _due(self, prompt: int, choice: Choice) -> Piece | None:
        key = (prompt, choice.index)
        piece = self._held.setdefault(key, Piece(choice.index))
        piece.add(choice)
        first = key not in self._begun and bool(piece.token_ids)
        if not (first or piece.finish_reason or len(piece.token_ids) >= self._interval):
            return None
        self._begun.add(key)
        return self._held.pop(key)
