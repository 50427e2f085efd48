"""`EngineLink`: how a front end follows the life of an engine process, wherever it is started."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from octavo.engine.process.wire import Settled


class EngineLink(ABC):
    """Belongs to one asyncio loop.

    address: of the engine while one runs. down_reason: why one runs no more. report: its startup
    report. Everything that happens is told to `on_up` and `on_down` once a client has set them.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.down_reason: str | None = None
        self.report: Any = None
        self.on_up: Callable[[], None] = _nothing
        self.on_down: Callable[[str], None] = _ignore
        self._settled: asyncio.Future[Settled] = asyncio.get_running_loop().create_future()
        self._up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    def launch(self) -> None:
        """Begin, in the loop."""

    @abstractmethod
    def close(self) -> None:
        """End it all, and wait for the end. From any thread; harmless when repeated."""

    async def settled(self) -> Settled:
        """What the configuration means; raises why the engine does not start."""
        return await asyncio.shield(self._settled)

    async def up(self) -> None:
        """Wait for the first start; raises why the engine does not start."""
        await asyncio.shield(self._up)

    # ---- for implementations ---------------------------------------------------------------------

    def _has_settled(self, message: Settled) -> None:
        if not self._settled.done():
            self._settled.set_result(message)

    def _is_up(self, address: str, report: Any) -> None:
        self.address, self.report = address, report
        self.down_reason = None
        if not self._up.done():
            self._up.set_result(None)
        self.on_up()

    def _is_down(self, reason: str) -> None:
        self.address = None
        self.down_reason = reason
        self.on_down(reason)

    def _has_failed(self, error: BaseException) -> None:
        """It did not come to a first start."""
        for future in (self._settled, self._up):
            if not future.done():
                future.set_exception(error)
                future.exception()  # whether somebody waits for it or not


def _nothing() -> None:
    """Nobody listens yet."""


def _ignore(_: str) -> None:
    """Nobody listens yet."""
