"""A double of CUDA graphs that refuses what a real capture refuses."""

from __future__ import annotations

import weakref

import torch

from octavo.testing.conformance.device import synchronisations


class Refused(RuntimeError):
    """What a real capture does not allow."""


SHARED, EACH = 10_000, 100
"""Bytes of a capture's memory pool, and of every graph beside its output."""


class FakeDevice:
    """Makes captures, and counts the memory that they take and give back. watch: look for waits,
    by a dispatch mode, under which torch.compile does nothing."""

    def __init__(
        self, memory: int = 1 << 30, fails_at: int | None = None, watch: bool = True
    ) -> None:
        self.memory, self.fails_at, self.watch = memory, fails_at, watch
        self.captures: list[FakeCapture] = []
        self.num_captures = self.num_replays = 0
        self.capturing = False

    def make_capture(self) -> FakeCapture:
        self.captures.append(FakeCapture(self))
        return self.captures[-1]


class FakeCapture:
    """Records a pass once and replays it by running it again into the same output. Refuses: waiting
    for the device while capturing, inputs that moved, an output of another shape, memory given back
    while a graph is held."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.taken = device, 0
        self.graphs: list[weakref.ref[FakeGraph]] = []

    def capture(self, run):
        device = self.device
        if device.fails_at is not None and len(self.graphs) == device.fails_at:
            raise Refused("operation not permitted when stream is capturing")
        device.num_captures += 1
        device.capturing = True
        try:
            return self._record(run)
        finally:
            device.capturing = False

    def _record(self, run):
        device = self.device
        outputs: list[torch.Tensor] = []
        waits = synchronisations(lambda: outputs.append(run())) if device.watch else []
        if not device.watch:
            outputs.append(run())
        if waits:
            raise Refused(f"operation not permitted when stream is capturing: {waits}")
        took = outputs[0].numel() * 4 + EACH + (0 if self.graphs else SHARED)
        self.taken += took
        device.memory -= took
        graph = FakeGraph(device, run, outputs[0])
        self.graphs.append(weakref.ref(graph))
        return graph, outputs[0]

    def free_bytes(self) -> int:
        return self.device.memory

    def release(self) -> None:
        if any(graph() is not None for graph in self.graphs):
            raise Refused("a graph of this pool is still held")
        self.device.memory += self.taken
        self.taken = 0


class FakeGraph:
    def __init__(self, owner: FakeDevice, run, output: torch.Tensor) -> None:
        self.owner, self.run, self.output = owner, run, output

    def replay(self) -> None:
        self.owner.num_replays += 1
        made = self.run()
        if made.shape != self.output.shape:
            raise Refused(f"a replay cannot change shapes: {made.shape}")
        self.output.copy_(made)
