"""Built-in samplers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="torch",
        factory="octavo.plugins.samplers.torch_sampler:TorchSampler",
        rank=10,
        summary="Reference sampler, on any device.",
    ),
]
