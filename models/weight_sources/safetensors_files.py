"""Reading safetensors with clear errors, and writing them one tensor at a time.

File format (https://huggingface.co/docs/safetensors): 8 bytes little-endian length N of a JSON
header, N bytes of header (name to dtype, shape and data offsets), then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.core.errors import WeightError

if TYPE_CHECKING:
    import torch

_ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}
_ALIGNMENT = 64


def read_tensors(files: list[Path], show_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every file, memory-mapped. Raises `WeightError` naming a damaged file."""
    from safetensors import SafetensorError, safe_open

    with progress_bar(
        "Loading weights", sum(f.stat().st_size for f in files), show_progress
    ) as bar:
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        tensor = opened.get_tensor(name)
                        yield name, tensor
                        bar.update(tensor.nbytes)
            except (SafetensorError, OSError) as error:
                raise WeightError(
                    f"{file}: truncated or damaged safetensors file: {error}"
                ) from error


def header(file: Path) -> dict[str, Any]:
    """The JSON header of a file, without torch. Raises `WeightError` naming a damaged file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length > file.stat().st_size:
                raise ValueError(f"a header of {length} bytes does not fit into the file")
            found = json.loads(stream.read(length))
        if not isinstance(found, dict):
            raise ValueError("the header is not a mapping")
    except (OSError, ValueError) as error:
        raise WeightError(f"{file}: truncated or damaged safetensors file: {error}") from error
    return found


def is_complete(file: Path) -> bool:
    """Whether a file has the bytes that its header promises, no fewer and no more."""
    try:
        entries = header(file)
        with file.open("rb") as stream:
            start = 8 + int.from_bytes(stream.read(8), "little")
        ends = [item["data_offsets"][1] for name, item in entries.items() if name[:2] != "__"]
        return file.stat().st_size == start + max(ends, default=0)
    except (WeightError, OSError, LookupError, TypeError):
        return False


def partial_files(file: Path) -> list[Path]:
    """What `write_tensors` has begun of a file, or left there when its process was killed."""
    return list(file.parent.glob(f".{file.name}.*"))


def progress_bar(description: str, total: int, show: bool) -> Any:
    """A bar in bytes on stderr. tqdm itself keeps quiet when stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(
        desc=description,
        total=total,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if show else True,
        leave=False,
    )


@dataclass(frozen=True)
class TensorHeader:
    """dtype: as safetensors spells it (F32, F16, BF16)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_SIZES[self.dtype]


def write_tensors(file: Path, headers: list[TensorHeader], contents: Iterable[Any]) -> None:
    """Write a file whose tensors come one at a time, as contiguous NumPy arrays or other buffers in
    the order of `headers`. It appears under its name only when it is complete."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    offset = 0
    for item in headers:
        end = offset + item.nbytes
        entries[item.name] = {
            "dtype": item.dtype,
            "shape": list(item.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGNMENT)
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    partial = Path(name)
    try:
        with open(descriptor, "wb") as stream:
            stream.write(len(encoded).to_bytes(8, "little"))
            stream.write(encoded)
            for item, content in zip(headers, contents, strict=True):
                data = memoryview(content).cast("B")
                assert len(data) == item.nbytes, f"{item.name} has {len(data)} bytes"
                stream.write(data)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
