"""How a layer's keys and values lie in memory: which layout, how many bytes, and its allocation.

Legend: N blocks, P tokens a block, K KV heads, D head size of keys, Dv of values (and what a layout
keeps beside them).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

from octavo.core.contracts.attention_backend import KVDim, KVLayout
from octavo.core.contracts.model import KVSpec
from octavo.core.errors import ConfigError

HOST_DIMS: tuple[KVDim, ...] = ("kv", "block", "token", "head", "dim")
"""Of host pools, whatever the layout on the device."""

_LOGICAL: tuple[KVDim, ...] = ("block", "token", "head", "dim")
"""Order of the dimensions of a layer's views."""


def block_bytes(
    specs: Sequence[KVSpec], layouts: Sequence[KVLayout], block_size: int, dtype: torch.dtype
) -> int:
    """Bytes of one block in all layers. `layouts[i]` belongs to `specs[i]`."""
    elements = sum(
        spec.num_kv_heads * (spec.head_size + spec.value_head_size + 2 * layout.extra)
        for spec, layout in zip(specs, layouts, strict=True)
    )
    return elements * block_size * dtype.itemsize


def choose_layout(layouts: Sequence[KVLayout], dtype: torch.dtype, block_size: int) -> KVLayout:
    """The first layout that holds this dtype in blocks of this size. Raises `ConfigError`."""
    name = str(dtype).removeprefix("torch.")
    for layout in layouts:
        if name in layout.dtypes and (not layout.block_sizes or block_size in layout.block_sizes):
            return layout
    offered = "; ".join(
        f"{'/'.join(layout.dtypes)} in blocks of "
        f"{'/'.join(map(str, layout.block_sizes)) or 'any size'}"
        for layout in layouts
    )
    raise ConfigError(
        f"the attention backend does not support a {name} KV cache in blocks of {block_size} "
        f"tokens; supported: {offered}",
        path="kv_cache",
    )


def allocate(
    spec: KVSpec,
    layout: KVLayout,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    pin: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys [N, P, K, D] and values [N, P, K, Dv], all zero, in the layout's strides."""
    sizes: dict[KVDim, int] = {
        "kv": 2,
        "block": num_blocks,
        "token": block_size,
        "head": spec.num_kv_heads,
        "dim": spec.head_size + layout.extra,
    }
    if spec.head_size != spec.value_head_size:
        # Keys and values of different sizes cannot share a tensor: two pools in the same order.
        dims = tuple(dim for dim in layout.dims if dim != "kv")
        halves = []
        for head_size in (spec.head_size, spec.value_head_size):
            sizes["dim"] = head_size + layout.extra
            storage = _zeros([sizes[dim] for dim in dims], dtype, device, pin)
            halves.append(storage.permute([dims.index(d) for d in _LOGICAL]))
        return halves[0], halves[1]
    storage = _zeros([sizes[dim] for dim in layout.dims], dtype, device, pin)
    order = [layout.dims.index("kv"), *(layout.dims.index(dim) for dim in _LOGICAL)]
    k, v = storage.permute(order).unbind(0)
    return k, v


def _zeros(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin: bool
) -> torch.Tensor:
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or pin or size < mmap.PAGESIZE:
        return torch.zeros(tuple(shape), dtype=dtype, device=device, pin_memory=pin)
    # Fresh pages are zero and take no memory until they are written.
    pages = mmap.mmap(-1, size)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
