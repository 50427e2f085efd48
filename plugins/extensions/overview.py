"""Engine extension `overview`: what an engine is doing right now, as plain data, for people to look
at. Its query `overview` is what the dashboard shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.engine_extension import (
    EngineExtension,
    EngineExtensionContext,
    SequenceView,
)
from octavo.core.contracts.kv_cache_manager import BlockState
from octavo.core.contracts.observer import RequestRecord
from octavo.core.contracts.provider import Options

MOST_CELLS = 4096
MOST_REQUESTS = 64


class Overview(EngineExtension):
    """Keeps the requests that ended last."""

    def __init__(self, options: Options, context: EngineExtensionContext) -> None:
        self._state, self._clock = context.state, context.clock
        self._recent: deque[RequestRecord] = deque(maxlen=MOST_REQUESTS)

    def on_finished(self, record: RequestRecord) -> None:
        self._recent.append(record)

    def queries(self) -> Mapping[str, Callable[..., Any]]:
        return {"overview": self.overview}

    def overview(self, cells: int = 1024, requests: int = 32) -> dict[str, Any]:
        """now: on the engine's clock, as all times are. blocks: see `block_map`, in at most `cells`
        cells. live: at most `requests` sequences that run or wait, those that run first. recent: as
        many that have ended, the newest first, with the fields of `RequestRecord`."""
        now, count = self._clock(), max(0, requests)
        live = [self._state.sequence(handle) for handle in self._state.handles()[:count]]
        return {
            "now": now,
            "blocks": block_map(self._state.block_states(), cells),
            "live": [_describe(each, now) for each in live if each is not None],
            "recent": [asdict(record) for record in list(self._recent)[::-1][:count]],
        }


def block_map(states: NDArray[np.uint8] | None, cells: int) -> dict[str, Any] | None:
    """The states of all blocks. counts: blocks by state. per_cell: blocks that a cell stands for;
    cells: a digit (`BlockState`) for each block when that is 1, else for each cell how many of its
    blocks are in each state, one cell after the other. None when the states are not known."""
    if states is None:
        return None
    kinds = len(BlockState)
    counts = np.bincount(states, minlength=kinds).tolist()
    per_cell = max(1, -(-len(states) // max(1, min(cells, MOST_CELLS))))
    shown: str | list[int]
    if per_cell == 1:
        shown = (states + ord("0")).tobytes().decode("ascii")
    else:
        number = -(-len(states) // per_cell)
        where = np.arange(len(states)) // per_cell * kinds + states
        shown = np.bincount(where, minlength=number * kinds).tolist()
    return {"counts": counts, "per_cell": per_cell, "cells": shown}


def _describe(sequence: SequenceView, now: float) -> dict[str, Any]:
    if sequence.slot < 0:
        state = "swapped" if sequence.swapped else "waiting"
    else:
        state = "prefill" if sequence.num_computed < sequence.num_prompt else "decode"
    return {
        "request_id": sequence.request_id,
        "index": sequence.index,
        "state": state,
        "age": now - sequence.arrival,
        "num_prompt": sequence.num_prompt,
        "num_computed": sequence.num_computed,
        "num_output": sequence.num_tokens - sequence.num_prompt,
        "max_tokens": sequence.max_tokens,
        "num_preemptions": sequence.num_preemptions,
    }
