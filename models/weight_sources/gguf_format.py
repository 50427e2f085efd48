"""Reading the GGUF file format: metadata and memory-mapped tensors. No torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
The gguf library's own reader makes several NumPy arrays for each of the hundred thousand strings of
a tokenizer, which takes seconds; this one takes a tenth of one.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import WeightError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_MAX_DIMENSIONS = 4


@dataclass(frozen=True)
class GGUFTensor:
    """kind: name of the ggml type (`F32`, `Q4_1`). shape: slowest dimension first. data: uint8, the
    raw bytes, a row of the last dimension after another."""

    name: str
    kind: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]


class _Cursor:
    """Reads values one after another; `IndexError` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if end > len(self.data):
            raise IndexError(f"the file ends at byte {len(self.data)}, {end} are needed")
        found = self.data[self.at : end]
        self.at = end
        return found

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = f"<{count}{_SCALARS[item]}"
                return list(struct.unpack(code, self.take(struct.calcsize(code))))
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"type {kind} of a metadata value is unknown")
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Metadata by key and tensors by name, in the file's order. Raises `WeightError` for a file
    that is truncated, damaged or no GGUF."""
    try:
        with path.open("rb") as stream:
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(_Cursor(data))
    except (ValueError, IndexError, OverflowError, OSError, struct.error, RecursionError) as error:
        raise WeightError(f"{path}: truncated or damaged GGUF file: {error}") from error


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    magic = cursor.take(4)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}, expected {_MAGIC!r}")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not read, only 2 and 3 in little endian")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [_tensor_info(cursor) for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", 32))
    if alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    start = -(-cursor.at // alignment) * alignment
    content = np.frombuffer(cursor.data, dtype=np.uint8)
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"two tensors are named '{name}'")
        tensors[name] = _tensor(content, start + offset, name, shape, kind)
    return metadata, tensors


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.string(), cursor.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise ValueError(f"tensor '{name}' has {dimensions} dimensions")
    sizes = [cursor.scalar("Q") for _ in range(dimensions)]
    return name, tuple(reversed(sizes)), cursor.scalar("I"), cursor.scalar("Q")


def _tensor(
    content: NDArray[np.uint8], start: int, name: str, shape: tuple[int, ...], kind: int
) -> GGUFTensor:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    ggml_type = GGMLQuantizationType(kind)
    block, nbytes = GGML_QUANT_SIZES[ggml_type]
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor '{name}' {list(shape)} does not consist of blocks of {block}")
    size = math.prod(shape) // block * nbytes
    if start + size > len(content):
        raise IndexError(
            f"the file ends at byte {len(content)}, tensor '{name}' at byte {start + size}"
        )
    return GGUFTensor(name, ggml_type.name, shape, content[start : start + size])
