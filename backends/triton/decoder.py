"""Graph runner `triton`: a plain decoder with its norms, residual sums and gates fused.

Takes a model that describes itself as a `DecoderSpec`, with any linear layers and any attention
backend. Between two linear layers there is one launch. Legend: T tokens, E hidden size, H query
heads, K KV heads, D head size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.nn import functional

from octavo.backends.triton.activation import Activation, gate
from octavo.backends.triton.norm import rms_norm
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import AttentionBackend, AttentionLayer
from octavo.core.contracts.graph_runner import GraphRunner, GraphRunnerContext
from octavo.core.contracts.model import AttentionSpec, DecoderLayerSpec, decoder_of
from octavo.core.errors import PluginUnavailable
from octavo.kernels import RopeTable, apply_rope

_ACTIVATIONS = ("silu", "gelu", "gelu_tanh")


class TritonDecoder(GraphRunner):
    """Computes what the model's own forward pass does, in the same dtypes."""

    def __init__(self, options: NoOptions, context: GraphRunnerContext) -> None:
        spec = decoder_of(context.model)
        if spec is None:
            name = type(context.model).__name__
            raise PluginUnavailable(
                f"graph runner triton computes plain decoders, {name} is not one"
            )
        if spec.activation not in _ACTIVATIONS:
            raise PluginUnavailable(
                f"graph runner triton has the activations {', '.join(_ACTIVATIONS)}, the model's "
                f"is {spec.activation}"
            )
        self._spec, self._context = spec, context
        self._fused = True
        self._activation = cast(Activation, spec.activation)
        self._tables: dict[tuple[int, bool], RopeTable] = {}

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, num_decodes: int
    ) -> torch.Tensor:
        if not self._fused:
            return self._context.forward(token_ids, positions)
        spec, bound = self._spec, self._context.attention_layers()
        norms = [*(layer.attention_norm for layer in spec.layers[1:]), spec.norm]
        residual = self._embedded(token_ids)
        hidden = rms_norm(residual, spec.layers[0].attention_norm, spec.norm_eps)
        for layer, after, (backend, cache) in zip(spec.layers, norms, bound, strict=True):
            attended = self._attention(layer, hidden, positions, backend, cache)
            hidden = rms_norm(layer.o(attended), layer.mlp_norm, spec.norm_eps, residual=residual)
            inner = gate(layer.gate_up(hidden), self._activation)
            hidden = rms_norm(layer.down(inner), after, spec.norm_eps, residual=residual)
        return hidden

    def invalidate(self) -> None:
        """Take the parts that the model has now; one that is no plain decoder any more computes
        itself."""
        spec = decoder_of(self._context.model)
        self._fused = spec is not None and len(spec.layers) == len(self._context.attention_layers())
        self._spec = spec or self._spec

    def _embedded(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, E], in memory that residual sums may be written to."""
        embedding = self._spec.embedding
        if isinstance(embedding, torch.Tensor):
            return functional.embedding(token_ids, embedding)
        rows: torch.Tensor = embedding.rows(token_ids)
        return rows

    def _attention(
        self,
        layer: DecoderLayerSpec,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        backend: AttentionBackend,
        cache: AttentionLayer,
    ) -> torch.Tensor:
        """[T, H * D] of hidden [T, E]."""
        spec, tokens = cache.spec, len(hidden)
        heads, both = spec.num_heads, spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(hidden).view(tokens, both + spec.num_kv_heads, spec.head_size)
        q, k, v = qkv[:, :heads], qkv[:, heads:both], qkv[:, both:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        if spec.rope_dim and cache.cos_sin is not None and not backend.fuses_rope:
            q, k = self._rotated(spec, cache.cos_sin, positions, q, k)
        out = hidden.new_empty(tokens, heads, spec.value_head_size)
        backend.run(cache, q, k, v, out)
        return out.view(tokens, -1)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[T, h, D]"""
        rows = x.reshape(-1, x.shape[-1])
        return rms_norm(rows, weight, self._spec.norm_eps).view(x.shape)

    def _rotated(
        self,
        spec: AttentionSpec,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        *heads: torch.Tensor,
    ) -> list[torch.Tensor]:
        key = (cos_sin.data_ptr(), spec.rope_interleaved)
        if key not in self._tables:
            self._tables[key] = RopeTable(cos_sin, spec.rope_interleaved)
        cos, sin = self._tables[key].rows(positions)
        return [apply_rope(x, cos, sin, interleaved=spec.rope_interleaved) for x in heads]
