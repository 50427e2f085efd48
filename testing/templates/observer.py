"""Observer `example`: counts tokens and logs a line every so many steps."""

from __future__ import annotations

import logging

from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.observer import Observer, ObserverContext, RequestRecord, StepRecord

log = logging.getLogger(__name__)


class ExampleOptions(Options):
    """How often it speaks."""

    every: int = Field(default=1000, ge=1, description="Steps between two lines of log.")


class ExampleObserver(Observer):
    """num_tokens: computed since the start. ended: requests by finish reason."""

    def __init__(self, options: ExampleOptions, context: ObserverContext) -> None:
        self._every = options.every
        self.num_steps = self.num_tokens = 0
        self.ended: dict[str, int] = {}

    def on_step(self, record: StepRecord) -> None:
        self.num_steps += 1
        self.num_tokens += record.num_tokens
        if self.num_steps % self._every == 0:
            log.info(
                "%d steps, %d tokens, %d requests run, %.0f%% of the KV cache is used",
                self.num_steps,
                self.num_tokens,
                record.num_running,
                100 * record.kv.usage,
            )

    def on_request(self, record: RequestRecord) -> None:
        self.ended[record.finish_reason] = self.ended.get(record.finish_reason, 0) + 1
