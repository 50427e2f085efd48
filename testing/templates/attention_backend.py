"""Attention backend `example`: each row's keys and values are gathered, then PyTorch attends."""

from __future__ import annotations

import torch

from octavo.core.contracts import Options, Platform
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleAttention(AttentionBackend):
    """One call of scaled_dot_product_attention a row: simple, and slow for many rows."""

    def __init__(self, options: ExampleOptions, context: AttentionBackendContext) -> None:
        self._batch: AttentionBatch | None = None

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        if spec.sinks or spec.alibi or spec.latent or spec.soft_cap is not None:
            return "it computes plain attention only: no sinks, ALiBi, latents or soft cap"
        if spec.num_heads % spec.num_kv_heads:
            return f"{spec.num_heads} query heads do not divide into {spec.num_kv_heads} groups"
        return None

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        return [KVLayout(("kv", "block", "token", "head", "dim"))]

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        batch = self._batch
        assert batch is not None, "run before plan"
        block_size = layer.k_cache.shape[1]
        blocks = batch.slot_mapping // block_size
        offsets = batch.slot_mapping % block_size
        layer.k_cache[blocks, offsets] = k.to(layer.k_cache.dtype)
        layer.v_cache[blocks, offsets] = v.to(layer.v_cache.dtype)
        for row in range(batch.num_rows):
            first, last = batch.query_start_loc_cpu[row : row + 2].tolist()
            length = int(batch.seq_lens_cpu[row])
            table = batch.block_table[row, : -(-length // block_size)].long()
            keys = layer.k_cache[table].flatten(0, 1)[:length].to(q.dtype)
            values = layer.v_cache[table].flatten(0, 1)[:length].to(q.dtype)
            queries = torch.arange(length - (last - first), length, device=q.device)
            distance = queries[:, None] - torch.arange(length, device=q.device)
            allowed = distance >= 0
            if layer.spec.window is not None:
                allowed &= distance < layer.spec.window
            out[first:last] = torch.nn.functional.scaled_dot_product_attention(
                q[first:last].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=allowed,
                scale=layer.spec.scale,
                enable_gqa=True,
            )[0].transpose(0, 1)
