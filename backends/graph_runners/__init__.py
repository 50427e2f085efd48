"""Built-in graph runners. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="eager",
        factory="octavo.backends.graph_runners.eager:EagerRunner",
        summary="Runs the model's forward pass as it is written.",
    ),
]
