"""A ZeroMQ DEALER socket inside an asyncio loop, without a task or a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import zmq

from octavo.engine.process import wire

LINGER_MS = 1000


class Channel:
    """To the engine at `address`. Belongs to the loop in which it is made.

    name: unique among all that are connected to one engine. on_message: called in the loop with
    every message that comes. Sending never waits: what the engine has not taken yet is kept.
    """

    def __init__(self, address: str, name: bytes, on_message: Callable[[Any], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._encode, self._decode = wire.to_engine().encode, wire.from_engine().decode
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.setsockopt(zmq.ROUTING_ID, name)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.connect(address)
        self._fd: int = self._socket.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._scheduled = False
        self._loop.add_reader(self._fd, self._schedule)

    def send(self, message: Any) -> None:
        """Send one message. Raises TypeError for what no message can hold."""
        if not self._socket.closed:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
            # The descriptor tells of changes only, and sending may have swallowed one.
            if self._socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:  # type: ignore
                self._schedule()

    def drain(self) -> None:
        """Handle all messages that are there."""
        while self._take():
            pass

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """One message a turn of the loop: whoever waits for what it brings comes before the next
        one, however fast the engine is."""
        self._scheduled = False
        if self._take():
            self._schedule()

    def _take(self) -> bool:
        if self._socket.closed:
            return False
        try:
            data = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._on_message(self._decode(data))
        return True

    def close(self) -> None:
        """Close the socket. Harmless when repeated."""
        if not self._socket.closed:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._fd)
            self._socket.close()
