"""`server.stream_interval`: several tokens of a choice in one event."""

from __future__ import annotations

from octavo.server.openai.joined import Joined, MadeOutput
from octavo.server.process.engine import Choice, Output


class Pace:
    """Holds the tokens of each choice back until `interval` of them have come. The first one, which
    clients measure, and the last one do not wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._held: dict[tuple[int, int], Joined] = {}
        self._begun: set[tuple[int, int]] = set()

    def take(self, prompt: int, output: Output) -> Output:
        """What is due now that this output has come."""
        if self._interval == 1:
            return output
        due = [piece for choice in output.outputs if (piece := self._due(prompt, choice))]
        return MadeOutput(due, output.finished, output.prompt_logprobs, output.num_cached_tokens)

    def _due(self, prompt: int, choice: Choice) -> Joined | None:
        key = (prompt, choice.index)
        piece = self._held.setdefault(key, Joined(choice.index))
        piece.add(choice)
        first = key not in self._begun and bool(piece.token_ids)
        if not (first or piece.finish_reason or len(piece.token_ids) >= self._interval):
            return None
        self._begun.add(key)
        return self._held.pop(key)
