"""Built-in preemption policies. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="recompute",
        factory="octavo.plugins.preemption.recompute:RecomputePolicy",
        summary="drop the victim's KV cache and compute it again",
    ),
]
