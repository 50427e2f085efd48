"""What the page shows, as one JSON object."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import octavo
from octavo.core.errors import OctavoError
from octavo.plugins.observers.prometheus.board import Board
from octavo.plugins.observers.prometheus.families import API, ENGINE
from octavo.server.http.errors import ApiError

if TYPE_CHECKING:
    from octavo.server.openai.state import ServerState

logger = logging.getLogger("octavo.server")

ENGINE_S = 1.5
"""Seconds that the engine gets to answer between two steps."""

KEPT_S = 0.4
"""For how long an answer serves others who ask."""


class Viewer:
    """Asks the engine once for all that look at the same time."""

    def __init__(self) -> None:
        self._asking: asyncio.Task[dict[str, Any] | None] | None = None
        self._answer: dict[str, Any] | None = None
        self._answered = 0.0

    async def look(self, state: ServerState) -> dict[str, Any]:
        """The page's data."""
        return {**_facts(state), **self._totals(state), "engine": await self._engine(state)}

    @staticmethod
    def _totals(state: ServerState) -> dict[str, Any]:
        return totals(state.metrics.board, up=state.llm.dead_reason is None)

    async def _engine(self, state: ServerState) -> dict[str, Any] | None:
        """The engine's query `overview`; None while the engine does not answer."""
        if _problem(state) is not None:
            return None
        if time.monotonic() - self._answered > KEPT_S:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.create_task(self._ask(state))
            await asyncio.wait({self._asking}, timeout=ENGINE_S)
            if not self._asking.done():
                return None  # a long step; the answer is for whoever asks next
        return self._answer

    async def _ask(self, state: ServerState) -> dict[str, Any] | None:
        try:
            self._answer = await state.llm.overview()
        except OctavoError:  # it died meanwhile: the next look says so
            self._answer = None
        except Exception:
            logger.exception("the engine's state cannot be shown")
            self._answer = None
        self._answered = time.monotonic()
        return self._answer


def _problem(state: ServerState) -> str | None:
    try:
        state.require_ready()
    except ApiError as error:
        return error.message
    return None


def _facts(state: ServerState) -> dict[str, Any]:
    report = getattr(state.llm, "report", None)
    problem = _problem(state)
    plugins = [] if report is None else report.plugins
    return {
        "version": octavo.__version__,
        "at": time.monotonic(),
        "models": state.names,
        "ready": problem is None,
        "problem": problem,
        "timelines": state.config.observability.timelines,
        "max_model_len": None if problem is not None else state.llm.max_model_len,
        "device": None if report is None else report.device,
        "dtype": None if report is None else report.dtype,
        "block_size": None if report is None else report.block_size,
        "max_num_seqs": None if report is None else report.max_num_seqs,
        "parts": {part.kind: part.name for part in plugins if part.kind in _SHOWN},
    }


_SHOWN = ("scheduler_policy", "kv_cache_manager", "attention_backend", "quantization")


def totals(board: Board, *, up: bool) -> dict[str, Any]:
    """Since the start: counters and gauges by name (those with a label: by its values), histograms
    as upper bounds, counts of each bucket (one more for what is above) and the sum. up: whether the
    engine runs; without one nothing runs or waits."""
    found = board.totals()
    numbers: dict[str, Any] = {}
    histograms: dict[str, Any] = {}
    for family in ENGINE + API:
        if family.kind == "histogram":
            row = found[family.name, ""]
            histograms[family.name] = {
                "bounds": family.buckets,
                "counts": row[:-1],
                "sum": row[-1],
            }
        elif family.label is None:
            gone = family.kind == "gauge" and family in ENGINE and not up
            numbers[family.name] = 0.0 if gone else found[family.name, ""][0]
        else:
            numbers[family.name] = {value: found[family.name, value][0] for value in family.values}
    return {"numbers": numbers, "histograms": histograms}
