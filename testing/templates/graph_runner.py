"""Graph runner `example`: runs the forward pass as it is written, and counts."""

from __future__ import annotations

import time

import torch

from octavo.core.contracts import Options
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleRunner(GraphRunner):
    """num_passes: by number of tokens, which is what a capture list is made from."""

    def __init__(self, options: ExampleOptions, context: GraphRunnerContext) -> None:
        self._forward = context.forward
        self.num_passes: dict[int, int] = {}

    def warm_up(self) -> dict[str, float]:
        started = time.perf_counter()
        self.num_passes.clear()
        return {"example": time.perf_counter() - started}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        count = len(token_ids)
        self.num_passes[count] = self.num_passes.get(count, 0) + 1
        return self._forward(token_ids, positions)
