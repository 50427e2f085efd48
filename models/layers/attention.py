"""Self-attention: fused q, k, v projection, optional q/k norm, the core's attention, o projection.

Legend: T tokens, E hidden size, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.core.contracts.model import AttentionFn, AttentionSpec
from octavo.core.contracts.quantization import QuantizationMethod
from octavo.models.layers.norm import RMSNorm


class SelfAttention(nn.Module):
    """[T, E] to [T, E]. Rope, KV write and attention are inside `attend`, which the core gives;
    q, k and v reach it as views of one tensor, contiguous in their last dimension only."""

    def __init__(
        self,
        prefix: str,
        hidden_size: int,
        spec: AttentionSpec,
        attend: AttentionFn,
        quantization: QuantizationMethod,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: RMSNorm | None = None,
    ) -> None:
        super().__init__()
        heads, kv_heads, size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self.shape = (heads + 2 * kv_heads, size)
        self.parts = (heads, kv_heads, kv_heads)
        self.normed_parts = (heads + kv_heads, kv_heads)
        self.qkv = quantization.linear(
            f"{prefix}.qkv_proj",
            hidden_size,
            (heads * size, kv_heads * size, kv_heads * size),
            qkv_bias,
        )
        self.o = quantization.linear(f"{prefix}.o_proj", heads * size, (hidden_size,), output_bias)
        self.qk_norm = qk_norm
        self.attend = attend

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).view(-1, *self.shape)
        if self.qk_norm is None:
            q, k, v = qkv.split(self.parts, dim=1)
        else:
            qk, v = qkv.split(self.normed_parts, dim=1)
            q, k = self.qk_norm(qk).split(self.parts[:2], dim=1)
        return self.o(self.attend(q, k, v, positions))  # type: ignore[no-any-return]
