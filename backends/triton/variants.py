"""Which kernels, with which dtypes and shapes, are compiled ahead of time (see `ahead`).

Every dtype, KV dtype, head size, block size and class of group size that the kernels take is there;
not their product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from octavo.backends.triton.activation import gate
from octavo.backends.triton.block_copy import BlockCopier
from octavo.backends.triton.decode import paged_decode
from octavo.backends.triton.kv_write import write_kv
from octavo.backends.triton.norm import rms_norm
from octavo.backends.triton.nucleus import cut_to_nucleus
from octavo.backends.triton.prefill import paged_prefill
from octavo.backends.triton.quantize import quantize_rows
from octavo.backends.triton.sampling import GumbelDraw
from octavo.core.contracts.model import AttentionSpec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Variant:
    """call: makes the launches, on host tensors."""

    name: str
    call: Callable[[], Any]


def _short(dtype: torch.dtype) -> str:
    return {
        torch.float32: "fp32",
        torch.float16: "fp16",
        torch.bfloat16: "bf16",
        torch.float8_e4m3fn: "e4m3",
        torch.float8_e5m2: "e5m2",
        torch.int8: "int8",
    }[dtype]


@dataclass(frozen=True)
class _Shape:
    """Of an attention variant."""

    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    head: int = 128
    block: int = 16
    group: int = 4
    window: int | None = None
    soft_cap: float | None = None
    rope: bool = True

    @property
    def name(self) -> str:
        kv = _short(self.kv_dtype or self.dtype)
        name = f"{_short(self.dtype)} kv {kv} head {self.head} block {self.block} G {self.group}"
        if self.window:
            name += " window"
        if self.soft_cap:
            name += " soft cap"
        return name if self.rope else f"{name} without rope"

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            num_heads=2 * self.group,
            num_kv_heads=2,
            head_size=self.head,
            value_head_size=self.head,
            scale=0.1,
            window=self.window,
            soft_cap=self.soft_cap,
            rope_dim=self.head if self.rope else 0,
        )

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """q, k, v, k_cache, v_cache, cos_sin of a batch of 16 tokens."""
        qkv = torch.empty(16, 2 * self.group + 4, self.head, dtype=self.dtype)
        q, k, v = qkv.split((2 * self.group, 2, 2), dim=1)
        pool = torch.empty(2, 8, self.block, 2, self.head, dtype=self.kv_dtype or self.dtype)
        return q, k, v, pool[0], pool[1], torch.empty(64, self.head)


def _rope(shape: _Shape, cos_sin: torch.Tensor) -> dict[str, torch.Tensor]:
    positions = torch.zeros(16, dtype=torch.int64)
    return {"positions": positions, "cos_sin": cos_sin} if shape.rope else {}


def _decode(shape: _Shape, splits: int) -> None:
    q, _, _, k_cache, v_cache, cos_sin = shape.tensors()
    numbers = torch.zeros(4096, dtype=torch.int32)
    paged_decode(
        q,
        k_cache,
        v_cache,
        numbers.view(16, 256),
        numbers,
        torch.empty_like(q, memory_format=torch.contiguous_format),
        shape.spec,
        splits=splits,
        partial=torch.empty(16),
        lse=torch.empty(16),
        **_rope(shape, cos_sin),
    )


def _prefill(shape: _Shape) -> None:
    q, _, _, k_cache, v_cache, cos_sin = shape.tensors()
    numbers = torch.zeros(4096, dtype=torch.int32)
    paged_prefill(
        q,
        k_cache,
        v_cache,
        numbers.view(16, 256),
        numbers,
        numbers,
        (numbers, numbers),
        torch.empty_like(q, memory_format=torch.contiguous_format),
        shape.spec,
        **_rope(shape, cos_sin),
    )


def _kv_write(shape: _Shape) -> None:
    _, k, v, k_cache, v_cache, cos_sin = shape.tensors()
    slots = torch.zeros(16, dtype=torch.int64)
    write_kv(k, v, k_cache, v_cache, slots, **_rope(shape, cos_sin))


def _attention_shapes() -> Iterator[_Shape]:
    for dtype in FLOATS:
        yield _Shape(dtype)
        yield _Shape(dtype, torch.float8_e4m3fn)
    yield _Shape(kv_dtype=torch.float8_e5m2)
    for head in (64, 80, 96, 256):
        yield _Shape(head=head)
    yield _Shape(torch.float32, head=256, group=1)
    yield _Shape(soft_cap=50.0, head=256, group=2, window=1024)


def _attention() -> Iterator[Variant]:
    shapes = list(_attention_shapes())
    for shape in shapes:
        yield Variant(f"prefill {shape.name}", lambda shape=shape: _prefill(shape))
    shapes += [_Shape(block=block) for block in (8, 32, 64, 128)]
    shapes += [_Shape(group=group) for group in (1, 7, 8, 32)]
    shapes.append(_Shape(rope=False))
    for shape in shapes:
        yield Variant(f"decode {shape.name}", lambda shape=shape: _decode(shape, 8))
    yield Variant("decode one split", lambda: _decode(_Shape(), 1))
    for dtype in FLOATS:
        for kv_dtype in (dtype, *FP8):
            shape = _Shape(dtype, kv_dtype)
            yield Variant(f"kv_write {shape.name}", lambda shape=shape: _kv_write(shape))
    shape = _Shape(head=96, rope=False)
    yield Variant(f"kv_write {shape.name}", lambda: _kv_write(shape))


def _copy(dtype: torch.dtype) -> None:
    pool = torch.empty(2, 8, 16, 2, 128, dtype=dtype)
    blocks = np.zeros(4, np.int32)
    BlockCopier(pool.device).copy([pool[0], pool[1]], blocks, blocks, blocks)


def _draw() -> None:
    logits, numbers = torch.empty(4, 128256), torch.zeros(4, dtype=torch.int64)
    GumbelDraw(4, 128256, logits.device)(logits, torch.empty(4), numbers, numbers, numbers)


def _nucleus() -> None:
    values, weights = torch.empty(4, 128256), torch.zeros(4, 128256, dtype=torch.int64)
    cut_to_nucleus(values, weights, weights[:, :1].contiguous(), torch.ones(4, dtype=torch.bool))


def _others() -> Iterator[Variant]:
    for dtype in FLOATS:
        name, x = _short(dtype), torch.empty(4, 4096, dtype=dtype)
        weight = torch.empty(4096, dtype=dtype)
        yield Variant(f"rms_norm {name}", lambda x=x, w=weight: rms_norm(x, w, 1e-5))
        yield Variant(
            f"rms_norm residual {name}", lambda x=x, w=weight: rms_norm(x, w, 1e-5, residual=x)
        )
        for kind in ("silu", "gelu", "gelu_tanh"):
            yield Variant(f"gate {kind} {name}", lambda x=x, kind=kind: gate(x, kind))
        for code in (torch.int8, *FP8):
            yield Variant(
                f"quantize_rows {name} to {_short(code)}",
                lambda x=x, code=code: quantize_rows(x, code),
            )
        yield Variant(f"block_copy {name}", lambda dtype=dtype: _copy(dtype))
    yield Variant("block_copy e4m3", lambda: _copy(torch.float8_e4m3fn))
    yield Variant("gumbel draw", _draw)
    yield Variant("nucleus", _nucleus)


VARIANTS: tuple[Variant, ...] = (*_attention(), *_others())
