"""Logits processor `example`: a token that was just generated becomes less likely for a while.

A request asks for it by `extra_args: {"example": 2.0}`, the amount taken off.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.logits_processor import (
    AttachedRequest,
    DeviceLogitsProcessor,
    LogitsProcessorContext,
)
from octavo.core.errors import RequestError


class ExampleOptions(Options):
    """How far back it looks."""

    window: int = Field(default=4, ge=1, description="Number of last tokens that are made rarer.")


@dataclass
class State:
    """One request. tokens: its whole output, so that a rollback is exact."""

    amount: float
    tokens: list[int] = field(default_factory=list)


class ExampleProcessor(DeviceLogitsProcessor):
    """State by slot, from committed tokens only."""

    def __init__(self, options: ExampleOptions, context: LogitsProcessorContext) -> None:
        self._window = options.window
        self._states: dict[int, State] = {}

    def attach(self, request: AttachedRequest) -> bool:
        amount = (request.params.extra_args or {}).get("example")
        if amount is None:
            return False
        if not isinstance(amount, int | float) or isinstance(amount, bool):
            raise RequestError(f"extra_args.example must be a number, got {amount!r:.40}")
        self._states[request.slot] = State(float(amount), request.output.tolist())
        return True

    def accept(self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self._states[slot].tokens.append(token)

    def rollback(self, slot: int, num_tokens: int) -> None:
        tokens = self._states[slot].tokens
        del tokens[len(tokens) - num_tokens :]

    def apply(self, logits: torch.Tensor, slots: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            state = self._states[slot]
            recent = sorted(set(state.tokens[-self._window :]))
            logits[row, recent] -= state.amount

    def detach(self, slot: int) -> None:
        del self._states[slot]
