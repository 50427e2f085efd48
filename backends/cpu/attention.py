"""Attention backend `cpu`: native kernels over a paged cache, rope fused.

A query's result has the same bits in any batch, chunking or number of threads; see attention.c.
Legend: T tokens, B rows, H query heads, K KV heads, D head size, Dv value size, N blocks, P tokens
a block.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from octavo.backends.cpu import native
from octavo.backends.cpu.support import unsupported
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVDim,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform
from octavo.core.errors import PluginUnavailable

_DTYPES = (torch.float32, torch.bfloat16)


class BatchPlan:
    """How one batch's work is cut for layers of one shape: K, H / K, Dv, window."""

    def __init__(self, library: Any, spec: AttentionSpec) -> None:
        self._library = library
        self._shape = (
            spec.num_kv_heads,
            spec.num_heads // spec.num_kv_heads,
            spec.value_head_size,
            spec.window or 0,
        )
        self.address = library.octavo_plan_new()

    def make(self, batch: int, threads: int) -> None:
        """Cut the batch at this address."""
        self._library.octavo_attention_plan(self.address, batch, *self._shape, threads)

    def __del__(self) -> None:
        self._library.octavo_plan_free(self.address)


class CpuAttention(AttentionBackend):
    """`batch_address` is of the planned batch's `batch_t`; with it, `layer_struct` and
    `plan_address` give a native caller of the kernels all it needs."""

    fuses_rope = True

    def __init__(self, options: NoOptions, context: AttentionBackendContext) -> None:
        if context.dtype not in _DTYPES:
            raise PluginUnavailable(
                f"the cpu attention backend computes float32 and bfloat16, not {context.dtype}"
            )
        self._library = native.kernels()
        self._dtype, self._block_size = context.dtype, context.block_size
        self._code = native.DTYPES[context.dtype]
        self._plans = {spec: BatchPlan(self._library, spec) for spec in context.specs}
        self._layers: dict[int, tuple[AttentionLayer, native.AttentionStruct]] = {}
        self.batch = native.BatchStruct(block_size=context.block_size)
        self.batch_address = ctypes.addressof(self.batch)
        self._planned: AttentionBatch | None = None
        self._threads = 1

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        return unsupported(spec, platform)

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        dims: tuple[KVDim, ...] = ("kv", "block", "head", "token", "dim")
        floats = ("float32", "bfloat16", "float16", "float8_e4m3fn")
        scaled = KVLayout(dims, ("int8",), extra=4)  # a float32 scale behind each head's values
        return [KVLayout(dims, floats), scaled]

    def plan(self, batch: AttentionBatch) -> None:
        self._planned = batch  # keeps its tensors alive
        native.fill_batch(self.batch, batch)
        self._threads = torch.get_num_threads()
        for plan in self._plans.values():
            plan.make(self.batch_address, self._threads)

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        q, k, v = _dense(q), _dense(k), _dense(v)
        self._library.octavo_attention(
            ctypes.addressof(self.layer_struct(layer)),
            self.batch_address,
            self._plans[layer.spec].address,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            self._code,
            out.data_ptr(),
            out.stride(0),
            self._threads,
        )

    def plan_address(self, spec: AttentionSpec) -> int:
        """Address of the planned batch's `plan_t` for layers of this spec."""
        address: int = self._plans[spec].address
        return address

    def layer_struct(self, layer: AttentionLayer) -> native.AttentionStruct:
        """The layer's `attention_t`; made once, until the layer gets another pool."""
        known = self._layers.get(layer.layer)
        if known is None or known[0] is not layer:
            known = self._layers[layer.layer] = (layer, native.attention_struct(layer))
        return known[1]


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x[T, h, D] with the heads of a token side by side; tokens may be apart."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
