"""Built-in samplers that need a device of their own. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, Requirement

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="cpu",
        factory="octavo.backends.cpu.sampler:CpuSampler",
        requires=(Requirement(devices=("cpu",)),),
        probe="octavo.backends.cpu.build:probe",
        rank=20,
        summary="Native CPU kernel: nothing is sorted, noise only where it can win.",
    ),
]
