"""Encodes messages as msgpack, without pickle: NumPy arrays included."""

from __future__ import annotations

import struct
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

M = TypeVar("M")

# An array is an extension value: its code names the dtype, its data are the number of dimensions
# (uint8), the shape (uint32 each, little endian) and the elements.
_CODES = {np.dtype(np.int32): 1, np.dtype(np.int64): 2, np.dtype(np.float32): 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _encode_hook(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _CODES:
        header = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        return msgspec.msgpack.Ext(_CODES[value.dtype], header + value.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__} in a message")


def _ext_hook(code: int, data: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.DecodeError(f"unknown extension code {code}")
    ndim = data[0]
    shape = struct.unpack_from(f"<{ndim}I", data, 1)
    dtype: Any = _DTYPES[code]
    return np.frombuffer(data, dtype, offset=1 + 4 * ndim).reshape(shape)


def _decode_hook(kind: Any, value: Any) -> Any:
    return value  # arrays were made by the extension hook


class Codec(Generic[M]):
    """Encodes and decodes one message type as msgpack. Decoded arrays are read-only views."""

    def __init__(self, message_type: type[M]) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_hook)
        self._decoder = msgspec.msgpack.Decoder(
            message_type, ext_hook=_ext_hook, dec_hook=_decode_hook
        )

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        return self._decoder.decode(data)
