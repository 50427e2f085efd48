"""Outputs of the server's own: deltas put together, for whole answers or for fewer events, and what
no engine made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.server.process.engine import Choice, TokenLogprob


@dataclass
class Joined:
    """A `Choice` that grows."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Mapping[int, TokenLogprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Choice) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs.extend(delta.logprobs)
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class MadeOutput:
    """An `Output`."""

    outputs: Sequence[Choice]
    finished: bool
    prompt_logprobs: Sequence[Mapping[int, TokenLogprob] | None] | None = None
    num_cached_tokens: int | None = None
