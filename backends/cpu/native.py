"""The compiled kernels as Python sees them: argument types, structures, and element types.

Functions are called through ctypes with addresses of tensors; every wrapper above this module
checks shapes, strides and dtypes first, because C does not.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from octavo.backends.cpu import build

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
        ("w", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
    ]


_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "octavo_isa": (c_char_p, ()),
    "octavo_packed_bytes": (c_int64, (c_int64,) * 3),
    "octavo_pack": (
        None,
        (c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64),
    ),
    "octavo_unpack": (None, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64)),
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


@functools.lru_cache
def kernels(isa: str = "native") -> Any:
    """The library with typed functions, compiled on first use. Raises `PluginUnavailable`."""
    return open_library(build.library(isa))


def open_library(path: Path) -> Any:
    """Load a library of the kernels and declare its functions."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def aligned(size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Zeros of `size` elements that start at a cache line."""
    spare = ALIGNMENT // dtype.itemsize
    memory = torch.zeros(size + spare, dtype=dtype)
    skip = -memory.data_ptr() % ALIGNMENT // dtype.itemsize
    return memory[skip : skip + size]
