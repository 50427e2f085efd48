"""Graph runner `eager`: the forward pass as it is written."""

from __future__ import annotations

import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext


class EagerRunner(GraphRunner):
    """Calls the model."""

    def __init__(self, options: NoOptions, context: GraphRunnerContext) -> None:
        self._forward = context.forward

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        return self._forward(token_ids, positions)
