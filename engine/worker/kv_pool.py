"""The KV pool: memory of every layer's cached keys and values, and copies between blocks.

Legend: N blocks (0 is the null block, which padding points at and which stays zero), P tokens a
block, K KV heads, D head size of keys, Dv of values (and what a layout keeps beside them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.attention_backend import KVLayout
from octavo.core.contracts.model import KVSpec
from octavo.core.errors import CapacityError
from octavo.core.messages import Int32
from octavo.engine.worker.kv_layout import HOST_DIMS, allocate, block_bytes
from octavo.engine.worker.side_stream import SideStream, side_stream
from octavo.kernels import upload

DEVICE_COPY, TO_HOST, TO_DEVICE = 0, 1, 2

CopyBlocks = Callable[[list[torch.Tensor], Int32, Int32, Int32], bool]
"""`AttentionBackend.copy_blocks`."""


@dataclass(frozen=True)
class LayerCache:
    """One layer's views of the pool: k [N, P, K, D] and v [N, P, K, Dv], in the layout's strides.
    The host twins are contiguous whatever the layout, and None without a host pool."""

    spec: KVSpec
    k: torch.Tensor
    v: torch.Tensor
    host_k: torch.Tensor | None = None
    host_v: torch.Tensor | None = None


class KVPool:
    """Pools of all layers. `layouts[i]` belongs to `specs[i]`.

    poison: fill fresh blocks with NaN (all but the null block), so that a test sees whoever reads
    what was never written. side: where copies from and to the host run (None: as suits the device).
    copiers: `AttentionBackend.copy_blocks` by group.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        layouts: Sequence[KVLayout],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
        poison: bool = False,
        side: SideStream | None = None,
        copiers: Mapping[int, CopyBlocks] | None = None,
    ) -> None:
        self._copiers = copiers or {}
        self.num_blocks, self.num_host_blocks = num_blocks, num_host_blocks
        self.block_size = block_size
        self.layers: list[LayerCache] = []
        self._side = side_stream(device) if side is None else side
        try:
            for spec, layout in zip(specs, layouts, strict=True):
                k, v = allocate(spec, layout, num_blocks, block_size, dtype=dtype, device=device)
                host_k = host_v = None
                if num_host_blocks:
                    host_k, host_v = allocate(
                        spec,
                        replace(layout, dims=HOST_DIMS),
                        num_host_blocks,
                        block_size,
                        dtype=dtype,
                        device=torch.device("cpu"),
                        pin=device.type != "cpu",
                    )
                if poison:
                    # All bits set is a NaN among scales, where values are integers.
                    worst = math.nan if dtype.is_floating_point else -1
                    k[1:].fill_(worst)
                    v[1:].fill_(worst)
                self.layers.append(LayerCache(spec, k, v, host_k, host_v))
        except (MemoryError, RuntimeError, OSError) as error:
            wanted = num_blocks * block_bytes(specs, layouts, block_size, dtype)
            raise CapacityError(
                f"no memory for a KV pool of {num_blocks} blocks ({wanted / 2**20:.0f} MiB): "
                f"{error}. Lower kv_cache.memory_utilization, or what is set of "
                "kv_cache.memory_bytes, kv_cache.num_blocks and kv_cache.block_size"
            ) from error

    def clear_null_block(self) -> None:
        """Zero what a warm-up wrote into block 0."""
        for layer in self.layers:
            layer.k[0].zero_()
            layer.v[0].zero_()

    def copy(self, copies: Int32) -> None:
        """Launch a plan's copies, int32[5, n] rows (kind, group, source, target, tokens), in order.
        Neighbours of one kind and group go together, unless one writes what another wrote, or, in
        the device, reads it."""
        start, total = 0, copies.shape[1]
        while start < total:
            stop = start + 1
            written = {int(copies[3, start])}
            while (
                stop < total
                and (copies[:2, stop] == copies[:2, start]).all()
                and (copies[0, start] != DEVICE_COPY or int(copies[2, stop]) not in written)
                and int(copies[3, stop]) not in written
            ):
                written.add(int(copies[3, stop]))
                stop += 1
            self._copy_run(copies[:, start:stop])
            start = stop

    def join(self) -> None:
        """The forward pass that is launched next comes after all copies."""
        self._side.join()

    def take_host_copies(self) -> Callable[[], float]:
        """The copies from and to the host since the last call: a function that waits for them and
        says how many seconds they took."""
        return self._side.take()

    def _copy_run(self, copies: Int32) -> None:
        kind, group = int(copies[0, 0]), int(copies[1, 0])
        layers = [cache for cache in self.layers if cache.spec.group == group]
        if kind == DEVICE_COPY:
            self._side.join()
            copier = self._copiers.get(group)
            pools = [part for cache in layers for part in (cache.k, cache.v)]
            if copier is not None and copier(pools, copies[2], copies[3], copies[4]):
                return
            sources, targets = (_on(layers[0].k, _places(copies[row], copies[4])) for row in (2, 3))
            for part in map(byte_view, pools):
                part[targets] = part[sources]
        else:
            self._side.run(lambda: self._copy_host_run(kind, layers, *copies[2:]))

    def _copy_host_run(
        self,
        kind: int,
        layers: Sequence[LayerCache],
        sources: Int32,
        targets: Int32,
        tokens: Int32,
    ) -> None:
        """Tokens that lie next to each other on the host are one transfer, from or to a contiguous
        tensor on the device."""
        on_host, on_device = (targets, sources) if kind == TO_HOST else (sources, targets)
        for start, stop in _stretches(on_host, tokens, self.block_size):
            places = _places(on_device[start:stop], tokens[start:stop])
            where = _on(layers[0].k, places)  # once: the layers are many, and uploads take time
            first = int(on_host[start]) * self.block_size
            last = first + int(tokens[start:stop].sum())
            for cache in layers:
                for part, host in ((cache.k, cache.host_k), (cache.v, cache.host_v)):
                    assert host is not None, "a plan swaps and there is no host pool"
                    flat, device = byte_view(host.flatten(0, 1)[first:last]), byte_view(part)
                    if kind == TO_HOST:
                        flat.copy_(device[where], non_blocking=True)
                    else:
                        device[where] = flat.to(device.device, non_blocking=True)


def _places(blocks: Int32, tokens: Int32) -> NDArray[np.int64]:
    """(block, offset) of the first `tokens[i]` tokens of each block, int64[2, T]."""
    offsets = np.concatenate([np.arange(n) for n in tokens])
    return np.stack([np.repeat(blocks, tokens), offsets]).astype(np.int64)


def _stretches(blocks: Int32, tokens: Int32, block_size: int) -> list[tuple[int, int]]:
    """Ranges of blocks that follow each other in memory, all full but the last."""
    joined = (np.diff(blocks) == 1) & (tokens[:-1] == block_size)
    ends = [*(np.flatnonzero(~joined) + 1).tolist(), len(blocks)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """8-bit floats as bytes: not every version of torch indexes them on a GPU."""
    eight_bits = tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1
    return tensor.view(torch.uint8) if eight_bits else tensor


def _on(tensor: torch.Tensor, places: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    block, offset = upload(places, tensor.device)
    return block, offset
