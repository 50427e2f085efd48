"""Graph runner `compile`: torch.compile of one decoder layer, which serves all layers.

The layers of a model are the longest list of modules in which a class repeats. Their forward pass
is compiled once a class, for any number of tokens, with attention as an opaque operator; embedding,
last norm and head stay as they are. A model without such a list is compiled whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch

from octavo.backends.graph_runners.options import CompileOptions
from octavo.core import envvars
from octavo.core.contracts.graph_runner import ForwardFn, GraphRunner, GraphRunnerContext

Call = Callable[..., Any]

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
        self._count = _Count()
        self._compiler: dict[str, Any] = {
            "dynamic": True,
            "backend": _counted(options, self._count),
        }
        self._patched: list[tuple[torch.nn.Module, Call]] = []
        self._code: dict[torch.nn.Module, Call] = {}
        self._forward: ForwardFn = context.forward
        self._prepare(fullgraph=True)

    @property
    def num_compiled(self) -> int:
        """See the class."""
        return self._count.value

    def compile(self) -> dict[str, float]:
        """Compile, and run the sizes that might be compiled anew."""
        started = time.perf_counter()
        for tokens in WARM_UP_TOKENS:
            for rows, each in ((1, tokens), (tokens, 1)):
                if rows <= self._context.max_num_seqs:
                    token_ids, positions = self._context.dummy(rows, each)
                    self.forward(token_ids, positions, rows if each == 1 else 0)
        return {"compile": time.perf_counter() - started}

    def invalidate(self) -> None:
        """Compile anew. Dynamo's guards see replaced layers and parameters, but not hooks, and each
        change counts toward its limit of recompilations; functions of its own have neither fault.
        What a plugin wraps around layers may break the graph."""
        self._prepare(fullgraph=False)
        self.compile()

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        return self._forward(token_ids, positions)

    def _prepare(self, *, fullgraph: bool) -> None:
        """Let the layers run by code that is made at their next call."""
        for layer, ours in self._patched:
            if vars(layer).get("forward") is ours:
                del layer.forward
        self._patched.clear()
        layers = repeated_layers(self._context.model)
        if not layers:
            self._forward = torch.compile(_anew(self._context.forward), **self._compiler)
            return
        self._forward = self._context.forward
        self._code.clear()
        by_kind: dict[Any, Call] = {}
        for layer in layers:
            kind = layer if _has_hooks(layer) else type(layer)
            if kind not in by_kind:
                function = _anew(type(layer).forward)
                by_kind[kind] = torch.compile(function, fullgraph=fullgraph, **self._compiler)
            self._code[layer] = by_kind[kind]
            if "forward" not in vars(layer):  # else a plugin's, which may call ours
                ours = partial(self._run_layer, layer)
                self._patched.append((layer, ours))
                layer.forward = ours

    def _run_layer(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        code = self._code.get(layer, type(layer).forward)
        return code(layer, *args, **kwargs)


def repeated_layers(model: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """The longest ModuleList in which a class comes twice or more; empty where there is none."""
    lists = [
        list(module)
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len(set(map(type, module))) < len(module)
    ]
    return max(lists, key=len, default=[])


def _has_hooks(layer: torch.nn.Module) -> bool:
    """Whether code for it cannot serve others of its class: guards do not tell hooks apart."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def _anew(call: Call) -> Call:
    """`call` with a code object of its own, by which torch.compile keeps what it has made."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return FunctionType(entry.__code__.replace(), entry.__globals__, closure=entry.__closure__)


@dataclass(slots=True)
class _Count:
    value: int = 0


def _counted(options: CompileOptions, count: _Count) -> Any:
    """The backend, counting its calls. torch._dynamo never forgets it: it must not know the runner,
    whose model and weights would stay as long."""
    from torch._dynamo.backends.registry import lookup_backend

    inner = lookup_backend(options.backend)
    modes: dict[str, Any] = {}
    if options.backend == "inductor" and options.mode != "default":
        modes = {"options": torch._inductor.list_mode_options(options.mode, dynamic=True)}

    def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        count.value += 1
        return inner(graph, inputs, **modes)

    return compile_graph
