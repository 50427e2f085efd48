"""Graph runner `native`: a whole decoder in one call of the CPU kernels.

Takes a model that describes itself as a `DecoderSpec`, whose linear layers are packed (quantization
`packed`, `int8` or `int4`) and whose attention backend is `cpu`.
Legend: T tokens, E hidden size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.attention import CpuAttention
from octavo.backends.cpu.linear import PackedLinear
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import AttentionBackend, AttentionLayer
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.core.contracts.model import DecoderSpec, decoder_of
from octavo.core.errors import PluginUnavailable
from octavo.kernels import is_plain

Bound = Sequence[tuple[AttentionBackend, AttentionLayer]]


class NativeDecoder(GraphRunner):
    """Hidden states are float32, and so is everything between embedding and final norm, whatever
    the weights' type. A token's result has the same bits in any batch."""

    def __init__(self, options: NoOptions, context: GraphRunnerContext) -> None:
        spec = decoder_of(context.model)
        if spec is None:
            name = type(context.model).__name__
            raise PluginUnavailable(
                f"graph runner native computes plain decoders, {name} is not one"
            )
        problem = next(_problems(spec, context.attention_backends), None)
        if problem is not None:
            raise PluginUnavailable(f"graph runner native cannot compute this model: {problem}")
        self._context = context
        self._library = native.kernels()
        self._take(spec)

    def invalidate(self) -> None:
        """Describe the model as it is now; one that the kernels cannot compute any more computes
        itself, with the same layers."""
        spec = decoder_of(self._context.model)
        usable = (
            spec is not None
            and len(spec.layers) == len(self._context.attention_layers())
            and not any(_problems(spec, self._context.attention_backends))
        )
        self._take(spec if usable else None)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        if self._spec is None:
            return self._context.forward(token_ids, positions)
        bound = self._context.attention_layers()
        if bound is not self._bound:
            self._bind(self._spec, bound)
        hidden = torch.empty(len(token_ids), self._hidden_size)
        self._library.octavo_decoder(
            ctypes.addressof(self._decoder),
            token_ids.data_ptr(),
            self._backends[0].batch_address,
            hidden.data_ptr(),
            torch.get_num_threads(),
        )
        return hidden

    # ---- structures that the kernels read --------------------------------------------------------

    def _take(self, spec: DecoderSpec | None) -> None:
        """Point at the parts of a model. None: at nothing."""
        self._spec = spec
        self._kept: list[Any] = []
        self._bound: Bound = ()
        self._backends: list[CpuAttention] = []
        if spec is not None:
            self._hidden_size = len(spec.norm)
            self._layers = (native.LayerStruct * len(spec.layers))()
            self._decoder = self._describe(spec)

    def _describe(self, spec: DecoderSpec) -> native.DecoderStruct:
        for struct, layer in zip(self._layers, spec.layers, strict=True):
            struct.attention_norm = self._floats(layer.attention_norm)
            struct.mlp_norm = self._floats(layer.mlp_norm)
            for name in ("qkv", "o", "gate_up", "down"):
                setattr(struct, name, cast(PackedLinear, getattr(layer, name)).packed.address)
        return native.DecoderStruct(
            layers=len(spec.layers),
            hidden=self._hidden_size,
            inner=cast(PackedLinear, spec.layers[0].down).in_features,
            **self._embedding(spec.embedding),
            activation=native.ACTIVATIONS[spec.activation],
            eps=spec.norm_eps,
            layer=ctypes.addressof(self._layers),
            norm=self._floats(spec.norm),
        )

    def _embedding(self, embedding: torch.Tensor | torch.nn.Module) -> dict[str, int]:
        """What the kernels read rows of the embedding from: a tensor, or a packed head."""
        if isinstance(embedding, PackedLinear):
            packed = embedding.packed
            return {"vocab": packed.out_features, "head": packed.address}
        table = self._keep(cast(torch.Tensor, embedding).detach())
        kind = native.DTYPES[table.dtype]
        return {"vocab": len(table), "embedding_type": kind, "embedding": table.data_ptr()}

    def _bind(self, spec: DecoderSpec, bound: Bound) -> None:
        """Point at the pool that was just allocated."""
        layers = spec.layers
        if len(bound) != len(layers):
            raise PluginUnavailable(
                f"graph runner native: {len(layers)} layers, {len(bound)} of them with attention"
            )
        self._backends = []
        for struct, layer, (backend, cache) in zip(self._layers, layers, bound, strict=True):
            assert isinstance(backend, CpuAttention), "other backends were refused"
            shape = backend.layer_struct(cache)
            if layer.q_norm is not None and layer.k_norm is not None:
                shape = native.copy_of(shape)
                shape.q_norm, shape.k_norm = self._floats(layer.q_norm), self._floats(layer.k_norm)
                shape.norm_eps = spec.norm_eps
                self._kept.append(shape)
            struct.attention = ctypes.addressof(shape)
            struct.plan = backend.plan_address(cache.spec)
            self._backends.append(backend)
        self._bound = bound

    def _floats(self, tensor: torch.Tensor) -> int:
        """Address of a float32 copy that lives as long as this runner."""
        return self._keep(tensor.detach().float().clone()).data_ptr()

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        return tensor


def _problems(spec: DecoderSpec, backends: Sequence[AttentionBackend]) -> Iterator[str]:
    """What the kernels do not compute."""
    if len(backends) > 1:
        yield f"it has {len(backends)} KV groups, expected one"
    for backend in backends:
        if not isinstance(backend, CpuAttention):
            yield f"its attention backend is {type(backend).__name__}, expected cpu"
    table = spec.embedding
    if not isinstance(table, torch.Tensor | PackedLinear):
        yield f"its embedding is a {type(table).__name__}"
    if isinstance(table, torch.Tensor):
        if table.dtype not in (torch.float32, torch.bfloat16):
            yield f"its embedding is {table.dtype}"
        if not table.is_contiguous():
            yield "its embedding is not contiguous"
    if spec.activation not in native.ACTIVATIONS:
        yield f"its activation {spec.activation} is not among {', '.join(native.ACTIVATIONS)}"
    for layer in spec.layers:
        for name in ("qkv", "o", "gate_up", "down"):
            part = getattr(layer, name)
            if not is_plain(part, PackedLinear):
                yield (
                    f"{name} is {type(part).__name__}, expected a packed layer as it was made "
                    "(model.quantization: packed, int8 or int4)"
                )
        if not cast(PackedLinear, layer.gate_up).packed.paired:
            yield "its gate and up have different sizes"
