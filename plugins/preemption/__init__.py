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
    Provider(
        name="swap",
        factory="octavo.plugins.preemption.swap:SwapPolicy",
        summary="move the victim's KV cache to the host, and bring it back",
    ),
    Provider(
        name="cost_model",
        factory="octavo.plugins.preemption.cost_model:CostModelPolicy",
        rank=10,  # what `auto` takes
        summary="per victim the cheaper of copying and computing again, as measured",
    ),
]
