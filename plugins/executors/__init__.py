"""Built-in executors. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="local",
        factory="octavo.plugins.executors.local:LocalExecutor",
        options="octavo.plugins.executors.local:LocalOptions",
        summary="One worker in the engine's own thread.",
    ),
    Provider(
        name="wire",
        factory="octavo.plugins.executors.wire:WireExecutor",
        options="octavo.plugins.executors.local:LocalOptions",
        rank=-1,
        summary="As local, with every plan and result encoded and decoded: for tests.",
    ),
    Provider(
        name="threaded",
        factory="octavo.plugins.executors.threaded:ThreadedExecutor",
        rank=-1,
        summary="One worker in a thread of its own; a step is planned while another runs.",
    ),
    Provider(
        name="simulated",
        factory="octavo.plugins.executors.simulated:SimulatedExecutor",
        options="octavo.plugins.executors.simulated:SimulatedOptions",
        rank=-1,
        summary="No model: steps take the time that a cost model says, for `octavo simulate`.",
    ),
]
