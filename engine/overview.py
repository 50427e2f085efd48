"""What an engine is doing right now, as plain data, for people to look at."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.core.contracts.kv_cache_manager import BlockState
from octavo.core.contracts.observer import RequestRecord

if TYPE_CHECKING:
    from octavo.core.contracts.kv_cache_manager import KVCacheManager
    from octavo.engine.scheduler.scheduler import Scheduler
    from octavo.engine.scheduler.state import SequenceState

MOST_CELLS = 4096
MOST_REQUESTS = 64


class Recent:
    """The requests that ended last."""

    def __init__(self) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=MOST_REQUESTS)

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    def newest(self, count: int) -> list[dict[str, Any]]:
        """At most so many, the newest first, with the fields of `RequestRecord`."""
        records = list(self._records)[::-1][: max(0, count)]
        return [asdict(record) for record in records]


def block_map(kv: KVCacheManager, cells: int) -> dict[str, Any] | None:
    """The states of all blocks. counts: blocks by state. per_cell: blocks that a cell stands for;
    cells: a digit (`BlockState`) for each block when that is 1, else for each cell how many of its
    blocks are in each state, one cell after the other. None when the manager does not tell."""
    states = kv.block_states()
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


def live_sequences(scheduler: Scheduler, now: float, count: int) -> list[dict[str, Any]]:
    """Sequences that run or wait, those that run first."""
    running = [one for one in scheduler.sequences.values() if one.slot >= 0]
    waiting = [one for one in scheduler.sequences.values() if one.slot < 0]
    return [_sequence(scheduler, one, now) for one in (running + waiting)[: max(0, count)]]


def _sequence(scheduler: Scheduler, sequence: SequenceState, now: float) -> dict[str, Any]:
    table, slot = scheduler.slots, sequence.slot
    if slot < 0:
        known, computed = len(sequence.known), 0
        state = "waiting" if sequence.swapped is None else "swapped"
    else:
        known, computed = int(table.num_tokens[slot]), int(table.num_computed[slot])
        state = "prefill" if computed < sequence.num_prompt else "decode"
    return {
        "request_id": sequence.request.request_id,
        "index": sequence.request.index,
        "state": state,
        "age": now - sequence.arrival,
        "num_prompt": sequence.num_prompt,
        "num_computed": computed,
        "num_output": known - sequence.num_prompt,
        "max_tokens": sequence.request.max_tokens,
        "num_preemptions": sequence.num_preemptions,
    }
