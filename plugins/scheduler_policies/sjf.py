"""Scheduler policy `sjf`: the shortest remaining prefill first, with ageing.

What is cached, or waits on the host, need not be computed: it does not count.

The key is `arrival + tokens / tokens_per_s`: a prompt goes before one that is longer by n tokens
unless that one arrived more than `n / tokens_per_s` seconds earlier. No prompt waits for ever,
since the longest of all falls behind at most `max_model_len / tokens_per_s` seconds of arrivals.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from octavo.core.contracts.provider import Options
from octavo.core.contracts.scheduler_policy import (
    RunningView,
    SchedulerPolicyContext,
    WaitingRequest,
)
from octavo.plugins.scheduler_policies.queue import QueuePolicy


class SjfOptions(Options):
    """Ageing."""

    tokens_per_s: float = Field(
        default=100.0,
        gt=0,
        description="Prompt tokens that one second of waiting outweighs. Small values are closer "
        "to shortest first, large ones to first come, first served.",
    )


class SjfPolicy(QueuePolicy):
    """Orders by remaining prefill and age."""

    def __init__(self, options: SjfOptions, context: SchedulerPolicyContext) -> None:
        super().__init__()
        self._seconds_a_token = 1.0 / options.tokens_per_s

    def key(self, request: WaitingRequest) -> float:
        return request.arrival + request.num_remaining * self._seconds_a_token

    def order(self, view: RunningView) -> NDArray[np.intp] | None:
        if len(view.slots) < 2:
            return None
        remaining = view.num_tokens - view.num_computed
        return np.argsort(view.arrival + remaining * self._seconds_a_token, kind="stable")

    def victim_keys(self, view: RunningView) -> NDArray[np.float64]:
        # By the prompt: a key that grew with the output would take turns among equals.
        return view.arrival + view.num_prompt * self._seconds_a_token
