"""Attention backend `torch`: the reference that other backends are compared with.

Every row's cached tokens are gathered token by token, so that nothing outside a row's own sequence
is ever read: padding points at the null block, which is zero. Decode rows of similar length share
one batched product; prefill rows run one by one.

Legend: T tokens, B rows, b rows of a bucket, H query heads, K KV heads, G = H / K, D head size, Dv
value head size, N blocks, P tokens a block, S tokens gathered for a row, n queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from octavo.backends.attention.cache_dtype import to_cache_dtype
from octavo.backends.attention.features import missing_feature, uneven_heads
from octavo.core.contracts import NoOptions
from octavo.core.contracts.attention_backend import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    KVLayout,
)
from octavo.core.contracts.model import AttentionSpec
from octavo.core.contracts.provider import Platform
from octavo.kernels import upload

_QUERY_SLICE = 256
"""Queries attended at once when a mask is needed, which bounds the mask's size."""

_KEPT_MASK = 16 * 2**20
"""Mask elements kept from layer to layer; masks beyond are made anew in each."""


@dataclass(slots=True)
class _Bucket:
    """Decode rows of similar length. rows: int64[b], None when they are the first b rows in order.
    tokens: int64[b * S] into the flat pool. mask: [b, 1, 1, S] added to the logits, None when every
    row has S tokens."""

    rows: torch.Tensor | None
    size: int
    length: int
    tokens: torch.Tensor
    mask: torch.Tensor | None


@dataclass(slots=True)
class _Slice:
    """Queries [start, stop) of the flat batch, at positions from `position` on, and the tokens
    they see: [first, last) of those gathered for the row."""

    start: int
    stop: int
    position: int
    first: int
    last: int
    mask: torch.Tensor | None = None


@dataclass(slots=True)
class _Prefill:
    """A row with tokens [start, stop) of the flat batch. tokens: int64[S] into the flat pool, from
    position `first` of the sequence on; None when the row's context is what it brings now."""

    start: int
    stop: int
    first: int
    tokens: torch.Tensor | None
    slices: list[_Slice]


@dataclass(slots=True)
class _Plan:
    buckets: list[_Bucket]
    prefills: list[_Prefill]


@dataclass(slots=True)
class _Call:
    """One layer's tensors. keys, values: its pool as [N * P, K * D] and [N * P, K * Dv]."""

    spec: AttentionSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    out: torch.Tensor


class TorchAttention(AttentionBackend):
    """In plain PyTorch, with `scaled_dot_product_attention` where it can express the layer."""

    def __init__(self, options: NoOptions, context: AttentionBackendContext) -> None:
        self._block_size, self._device = context.block_size, context.device
        self._dtype, self._kv_dtype = context.dtype, context.kv_dtype
        self._windows = {spec.window for spec in context.specs}
        self._plans: dict[int | None, _Plan] = {}
        self._num_decodes, self._num_tokens = 0, 0
        self._slot_mapping = torch.zeros(0, dtype=torch.int64)
        self._workspace = [torch.empty(0, dtype=context.kv_dtype) for _ in range(2)]

    @staticmethod
    def supports(spec: AttentionSpec, platform: Platform) -> str | None:
        return missing_feature(spec, "torch") or uneven_heads(spec)

    @staticmethod
    def kv_layouts(spec: AttentionSpec) -> list[KVLayout]:
        return [KVLayout(dims=("kv", "block", "token", "head", "dim"))]

    # ---- once a batch ---------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        self._slot_mapping = batch.slot_mapping
        self._num_decodes, self._num_tokens = batch.num_decodes, batch.num_tokens
        for window in self._windows:
            self._plans[window] = _Plan(
                self._decode_buckets(batch, window), self._prefills(batch, window)
            )

    def _tokens(
        self, block_table: torch.Tensor, first: torch.Tensor, stop: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pool indices int64[b, S] of the tokens [first, stop) of each row, and bool[b, S], which
        of them exist; the others point at the null block."""
        index = first.unsqueeze(1) + torch.arange(length, device=self._device)
        exists = index < stop.unsqueeze(1)
        index = torch.where(exists, index, 0)
        block = block_table.gather(1, index // self._block_size).long()
        tokens = block * self._block_size + index % self._block_size
        return torch.where(exists, tokens, 0), exists

    def _decode_buckets(self, batch: AttentionBatch, window: int | None) -> list[_Bucket]:
        if not batch.num_decodes:
            return []
        stop = batch.seq_lens[: batch.num_decodes].long()
        first = torch.zeros_like(stop) if window is None else (stop - window).clamp_(min=0)
        lengths = batch.seq_lens_cpu[: batch.num_decodes]
        if window is not None:
            lengths = lengths.clip(max=window)
        order = lengths.argsort(kind="stable")
        ascending = lengths[order]
        buckets = []
        upper = batch.num_decodes
        while upper:
            # Down to half of the longest: padding at most doubles what is gathered.
            length = int(ascending[upper - 1])
            lower = int(ascending.searchsorted(length // 2, side="right")) if length > 64 else 0
            lower = min(lower, upper - 1)
            whole = upper - lower == batch.num_decodes
            rows = None if whole else upload(order[lower:upper], self._device)
            buckets.append(
                self._bucket(batch.block_table[: batch.num_decodes], rows, first, stop, length)
            )
            upper = lower
        return buckets

    def _bucket(
        self,
        block_table: torch.Tensor,
        rows: torch.Tensor | None,
        first: torch.Tensor,
        stop: torch.Tensor,
        length: int,
    ) -> _Bucket:
        if rows is not None:
            block_table, first, stop = block_table[rows], first[rows], stop[rows]
        tokens, exists = self._tokens(block_table, first, stop, length)
        mask = None
        if len(first) > 1:
            mask = _additive(exists, self._dtype)[:, None, None]
        return _Bucket(rows, len(first), length, tokens.flatten(), mask)

    def _prefills(self, batch: AttentionBatch, window: int | None) -> list[_Prefill]:
        prefills = []
        starts = batch.query_start_loc_cpu
        for row in range(batch.num_decodes, batch.num_rows):
            start, stop = int(starts[row]), int(starts[row + 1])
            total = int(batch.seq_lens_cpu[row])
            position = total - (stop - start)
            first = 0 if window is None else max(0, position + 1 - window)
            tokens = None
            if position or self._kv_dtype != self._dtype:
                bounds = upload(np.array([[first], [total]]), self._device)
                table = batch.block_table[row : row + 1]
                tokens = self._tokens(table, bounds[0], bounds[1], total - first)[0].flatten()
            slices = self._slices(start, stop, position, first, window)
            prefills.append(_Prefill(start, stop, first, tokens, slices))
        return prefills

    def _slices(
        self, start: int, stop: int, position: int, first: int, window: int | None
    ) -> list[_Slice]:
        if position == 0 and (window is None or stop - start <= window):
            return []  # plain causal attention needs no mask
        slices, kept = [], 0
        for begin in range(start, stop, _QUERY_SLICE):
            end = min(begin + _QUERY_SLICE, stop)
            at = position + begin - start
            low = 0 if window is None else max(0, at + 1 - window)
            last = at + end - begin
            part = _Slice(begin, end, at, low - first, last - first)
            kept += (end - begin) * (last - low)
            if kept <= _KEPT_MASK:
                part.mask = self._mask(part, first, window)
            slices.append(part)
        return slices

    def _mask(self, part: _Slice, first: int, window: int | None) -> torch.Tensor:
        """[n, S] added to the logits of a slice."""
        seen = torch.arange(first + part.first, first + part.last, device=self._device)
        query = torch.arange(
            part.position, part.position + part.stop - part.start, device=self._device
        ).unsqueeze(1)
        allowed = seen <= query
        if window is not None:
            allowed &= seen > query - window
        return _additive(allowed, self._dtype)

    # ---- once a layer ---------------------------------------------------------------------------

    def run(
        self,
        layer: AttentionLayer,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        # In this layout tokens follow each other in memory, whatever their block.
        call = _Call(layer.spec, q, k, v, _flat(layer.k_cache), _flat(layer.v_cache), out)
        call.keys.index_copy_(0, self._slot_mapping, to_cache_dtype(k.flatten(1), self._kv_dtype))
        call.values.index_copy_(0, self._slot_mapping, to_cache_dtype(v.flatten(1), self._kv_dtype))
        plan = self._plans[layer.spec.window]
        for bucket in plan.buckets:
            self._decode(bucket, call)
        for prefill in plan.prefills:
            self._prefill(prefill, call)

    def _decode(self, bucket: _Bucket, call: _Call) -> None:
        spec, q, out = call.spec, call.q, call.out
        k, v = self._gather(call, bucket.tokens)
        # [b, K, S, D]; the G query heads of a KV head stand where queries do: [b, K, G, D].
        k = k.view(bucket.size, bucket.length, *k.shape[1:]).transpose(1, 2)
        v = v.view(bucket.size, bucket.length, *v.shape[1:]).transpose(1, 2)
        queries = q[: bucket.size] if bucket.rows is None else q.index_select(0, bucket.rows)
        queries = queries.view(bucket.size, spec.num_kv_heads, -1, spec.head_size)
        attended = _attend(queries, k, v, spec, mask=bucket.mask)
        if bucket.rows is None:
            out[: bucket.size].view(attended.shape).copy_(attended)
        else:
            out.index_copy_(0, bucket.rows, attended.reshape(bucket.size, *out.shape[1:]))

    def _prefill(self, prefill: _Prefill, call: _Call) -> None:
        spec = call.spec
        if prefill.tokens is None:
            k, v = call.k[prefill.start : prefill.stop], call.v[prefill.start : prefill.stop]
        else:
            k, v = self._gather(call, prefill.tokens)
        # KV heads stand where batches do, and their G query heads share them: [K, G, S, D].
        group = spec.num_heads // spec.num_kv_heads
        k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        shape = (-1, spec.num_kv_heads, group)
        queries = call.q.view(*shape, spec.head_size).permute(1, 2, 0, 3)
        out = call.out.view(*shape, spec.value_head_size).permute(1, 2, 0, 3)
        if not prefill.slices:
            part = slice(prefill.start, prefill.stop)
            out[:, :, part] = _attend(queries[:, :, part], k, v, spec, causal=True)
        for item in prefill.slices:
            part, seen = slice(item.start, item.stop), slice(item.first, item.last)
            mask = item.mask
            if mask is None:
                mask = self._mask(item, prefill.first, spec.window)
            out[:, :, part] = _attend(
                queries[:, :, part], k[:, :, seen], v[:, :, seen], spec, mask=mask
            )

    def _gather(self, call: _Call, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [S, K, D] and values [S, K, Dv] of these tokens, in memory that every layer reuses:
        fresh memory of this size would cost more than the copy."""
        found = []
        for which, pool in enumerate((call.keys, call.values)):
            size = len(tokens) * pool.shape[1]
            if self._workspace[which].numel() < size:
                self._workspace[which] = torch.empty(size, dtype=pool.dtype, device=pool.device)
            target = self._workspace[which][:size].view(len(tokens), pool.shape[1])
            torch.index_select(pool, 0, tokens, out=target)
            found.append(target.view(len(tokens), call.spec.num_kv_heads, -1).to(call.q.dtype))
        return found[0], found[1]


def _flat(cache: torch.Tensor) -> torch.Tensor:
    """[N, P, K, D] as [N * P, K * D]."""
    return cache.view(cache.shape[0] * cache.shape[1], cache.shape[2] * cache.shape[3])


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where allowed, -inf elsewhere."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: AttentionSpec,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """softmax(scale * q k^T + mask) v over the last two dimensions of q [..., n, D], k [..., S, D],
    v [..., S, Dv]; logits are capped before the mask."""
    if spec.soft_cap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale
        )
    logits = torch.matmul(q.float(), k.float().transpose(-1, -2)) * spec.scale
    logits = torch.tanh(logits / spec.soft_cap) * spec.soft_cap
    if mask is not None:
        logits += mask
    elif causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits += _additive(seen, q.dtype)
    return torch.matmul(logits.softmax(-1), v.float()).to(q.dtype)
