"""Graph runner `compile`: torch.compile of one decoder layer, which serves all layers.

The layers of a model are the longest list of modules of one class. Their forward pass is compiled
once, for any number of tokens, with attention as an opaque operator; embedding, last norm and head
stay as they are. A model without such a list is compiled whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from octavo.backends.graph_runners.options import CompileOptions
from octavo.core import envvars
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext

WARM_UP_TOKENS = (16, 1, 5)
"""Prompt tokens or rows of the warm-up passes; the first compiles, the others must not."""


class CompileRunner(GraphRunner):
    """num_compiled: how often code was made. Inductor keeps its work in Octavo's cache folder, so
    that a second start finds it."""

    def __init__(self, options: CompileOptions, context: GraphRunnerContext) -> None:
        folder = envvars.CACHE_DIR.get() / "inductor"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
        # One layer is little to compile: no pool of processes that would stay.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        self._context = context
        self._forward = context.forward
        compiler: dict[str, Any] = {"dynamic": True, "backend": _counted(options, self)}
        layers = repeated_layers(context.model)
        self.num_compiled = 0
        if layers:
            forward = torch.compile(type(layers[0]).forward, fullgraph=True, **compiler)
            for layer in layers:
                layer.forward = forward.__get__(layer)
        else:
            self._forward = torch.compile(context.forward, **compiler)

    def warm_up(self) -> dict[str, float]:
        """Compile, and run the sizes that might be compiled anew."""
        started = time.perf_counter()
        for tokens in WARM_UP_TOKENS:
            for rows, each in ((1, tokens), (tokens, 1)):
                if rows <= self._context.max_num_seqs:
                    token_ids, positions = self._context.dummy(rows, each)
                    self.forward(token_ids, positions, rows if each == 1 else 0)
        return {"compile": time.perf_counter() - started}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        return self._forward(token_ids, positions)


def repeated_layers(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The longest ModuleList of one class; empty where there is none of two or more."""
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len({type(item) for item in module}) == 1
    ]
    longest = max(lists, key=len, default=[])
    return longest if len(longest) > 1 else []


def _counted(options: CompileOptions, runner: CompileRunner) -> Any:
    """The backend, counting its calls in `runner.num_compiled`."""
    from torch._dynamo.backends.registry import lookup_backend

    inner = lookup_backend(options.backend)
    modes: dict[str, Any] = {}
    if options.backend == "inductor" and options.mode != "default":
        modes = {"options": torch._inductor.list_mode_options(options.mode, dynamic=True)}

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        runner.num_compiled += 1
        return inner(graph, inputs, **modes)

    return compile_graph
