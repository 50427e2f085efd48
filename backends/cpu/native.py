"""The compiled kernels as Python sees them: argument types, structures, and element types.

Functions are called through ctypes with addresses of tensors; every wrapper above this module
checks shapes, strides and dtypes first, because C does not.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_double, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from octavo.backends import CPU_ISA
from octavo.backends.cpu import build
from octavo.core.contracts.attention_backend import AttentionBatch, AttentionLayer

ALIGNMENT = 64

F32, BF16, F16, FP8, I8 = range(5)
DTYPES: dict[torch.dtype, int] = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float8_e4m3fn: FP8,
    torch.int8: I8,
}
"""Element types as the kernels number them."""

W_F32, W_BF16, W_I8, W_I4 = range(4)
"""Kinds of packed weights, see linear.c."""


class LinearStruct(ctypes.Structure):
    """`linear_t` of kernels.h."""

    _fields_ = [
        ("k", c_int64),
        ("n", c_int64),
        ("kind", c_int64),
        ("paired", c_int64),
        ("w", c_void_p),
        ("bias", c_void_p),
    ]


class AttentionStruct(ctypes.Structure):
    """`attention_t` of kernels.h."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_size", "value_size", "window")),
        *((name, c_int64) for name in ("rope_dim", "rope_interleaved", "kv_type")),
        ("scale", c_double),
        ("soft_cap", c_double),
        ("norm_eps", c_double),
        *((name, c_void_p) for name in ("cos_sin", "q_norm", "k_norm")),
        ("k", c_void_p),
        ("v", c_void_p),
        *((name, c_int64) for name in ("k_block", "k_token", "k_head")),
        *((name, c_int64) for name in ("v_block", "v_token", "v_head")),
    ]


class BatchStruct(ctypes.Structure):
    """`batch_t` of kernels.h."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "tokens", "block_size", "table_stride")),
        *((name, c_void_p) for name in ("starts", "seq_lens", "table", "slots", "positions")),
    ]


SAMPLING_COLUMNS = ("temperature", "top_p", "min_p", "top_k", "seed", "position", "index")


class SamplingStruct(ctypes.Structure):
    """`columns_t` of sampling.c."""

    _fields_ = [(name, c_void_p) for name in SAMPLING_COLUMNS]


class LayerStruct(ctypes.Structure):
    """`layer_t` of decoder.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm")),
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down", "attention", "plan")),
    ]


class DecoderStruct(ctypes.Structure):
    """`decoder_t` of decoder.c."""

    _fields_ = [
        *((name, c_int64) for name in ("layers", "hidden", "inner", "vocab")),
        *((name, c_int64) for name in ("embedding_type", "activation")),
        ("eps", c_double),
        *((name, c_void_p) for name in ("layer", "norm", "embedding", "head")),
    ]


ACTIVATIONS = {"silu": 1, "gelu": 2, "gelu_tanh": 3}
"""Activations of gated layers as the kernels number them."""

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "octavo_isa": (c_char_p, ()),
    "octavo_measure_read": (c_float, (c_void_p, c_int64, c_int64)),
    "octavo_measure_multiply": (c_int64, (c_int64, c_int64, c_void_p)),
    "octavo_packed_bytes": (c_int64, (c_int64,) * 4),
    "octavo_pack_bias": (None, (c_void_p, c_int64, c_int64, c_void_p)),
    "octavo_pack": (
        None,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64),
    ),
    "octavo_unpack": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64)),
    "octavo_plan_new": (c_void_p, ()),
    "octavo_plan_free": (None, (c_void_p,)),
    "octavo_attention_plan": (None, (c_void_p, c_void_p, *(c_int64,) * 5)),
    "octavo_attention": (
        None,
        (
            *(c_void_p,) * 3,
            *(c_void_p, c_int64) * 3,
            c_int64,
            c_void_p,
            c_int64,
            c_int64,
        ),
    ),
    "octavo_decoder": (None, (*(c_void_p,) * 4, c_int64)),
    "octavo_sample": (None, (c_void_p, *(c_int64,) * 3, *(c_void_p,) * 3, c_int64)),
    "octavo_linear": (
        None,
        (
            c_void_p,
            c_void_p,
            c_int64,
            c_int64,
            c_int64,
            c_void_p,
            c_int64,
            c_int64,
            c_int64,
        ),
    ),
}


def kernels(isa: str | None = None) -> Any:
    """The library with typed functions, compiled on first use; isa: of `OCTAVO_CPU_ISA` when it is
    not given. Raises `PluginUnavailable`."""
    return _kernels(isa or CPU_ISA.get())


@functools.lru_cache
def _kernels(isa: str) -> Any:
    return open_library(build.library(isa))


def open_library(path: Path) -> Any:
    """Load a library of the kernels and declare its functions."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def attention_struct(layer: AttentionLayer) -> AttentionStruct:
    """A layer as the kernels see it. Its tensors must outlive the result."""
    spec, k, v = layer.spec, layer.k_cache, layer.v_cache
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("the KV pool's innermost dimension must be `dim`")
    rope = layer.cos_sin
    if rope is not None and not (rope.dtype == torch.float32 and rope.is_contiguous()):
        raise ValueError(f"expected a contiguous float32 rope table, got {rope.dtype}")
    return AttentionStruct(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        value_size=spec.value_head_size,
        window=spec.window or 0,
        rope_dim=spec.rope_dim if rope is not None else 0,
        rope_interleaved=spec.rope_interleaved,
        kv_type=DTYPES[k.dtype],
        scale=spec.scale,
        soft_cap=spec.soft_cap or 0.0,
        cos_sin=None if rope is None else rope.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_block=k.stride(0),
        k_token=k.stride(1),
        k_head=k.stride(2),
        v_block=v.stride(0),
        v_token=v.stride(1),
        v_head=v.stride(2),
    )


def copy_of(struct: AttentionStruct) -> AttentionStruct:
    """A structure with the same values."""
    return AttentionStruct.from_buffer_copy(struct)


def fill_batch(struct: BatchStruct, batch: AttentionBatch) -> None:
    """Point a `batch_t` at a step's tensors, which must outlive its use."""
    table = batch.block_table
    if table.stride(1) != 1:
        raise ValueError("a row's block ids must lie side by side")
    struct.rows, struct.tokens = batch.num_rows, batch.num_tokens
    struct.table_stride = table.stride(0)
    struct.starts = batch.query_start_loc.data_ptr()
    struct.seq_lens = batch.seq_lens.data_ptr()
    struct.table = table.data_ptr()
    struct.slots = batch.slot_mapping.data_ptr()
    struct.positions = batch.positions.data_ptr()


def aligned(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Zeros of `size` elements that start at a cache line."""
    spare = ALIGNMENT // dtype.itemsize
    memory = torch.zeros(size + spare, dtype=dtype)
    skip = -memory.data_ptr() % ALIGNMENT // dtype.itemsize
    return memory[skip : skip + size]
