"""One line of statistics every ten seconds in which something happened."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from octavo.plugins.observers.prometheus.board import Board
from octavo.server.config import ServiceConfig

logger = logging.getLogger("octavo.server.stats")

INTERVAL_S = 10.0

Totals = dict[tuple[str, str], list[float]]


@contextlib.asynccontextmanager
async def logged_stats(board: Board, config: ServiceConfig) -> AsyncIterator[None]:
    """Log while the block runs, unless `observability.log_stats` says no."""
    if not config.observability.log_stats:
        yield
        return
    task = asyncio.create_task(_log(board), name="octavo-stats")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _log(board: Board) -> None:
    before, since = board.totals(), time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now, totals = time.monotonic(), board.totals()
        text = line(before, totals, now - since)
        if text is not None:
            logger.info("%s", text)
        before, since = totals, now


def line(before: Totals, after: Totals, seconds: float) -> str | None:
    """What happened between two looks at the board; None when nothing did."""

    def grown(name: str, value: str = "") -> float:
        return after[name, value][0] - before[name, value][0]

    def now(name: str) -> float:
        return after[name, ""][0]

    running, waiting = now("num_requests_running"), now("num_requests_waiting")
    refused = grown("admission_rejections", "requests") + grown("admission_rejections", "tokens")
    steps = sum(after["iteration_tokens_total", ""][:-1]) - sum(
        before["iteration_tokens_total", ""][:-1]
    )
    if not (running or waiting or refused or steps):
        return None
    parts = [
        f"prompt {grown('prompt_tokens') / seconds:.1f} tokens/s",
        f"generation {grown('generation_tokens') / seconds:.1f} tokens/s",
        f"running {running:.0f}",
        f"waiting {waiting:.0f}",
        f"KV cache {100 * now('kv_cache_usage_perc'):.1f}%",
    ]
    queries = grown("prefix_cache_queries")
    if queries:
        parts.append(f"prefix cache hits {100 * grown('prefix_cache_hits') / queries:.1f}%")
    if grown("num_preemptions"):
        parts.append(f"preemptions {grown('num_preemptions'):.0f}")
    if refused:
        parts.append(f"refused {refused:.0f}")
    return ", ".join(parts)
