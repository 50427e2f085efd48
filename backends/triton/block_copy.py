"""Copies between KV blocks of all layers in one launch: copy-on-write, swap out, swap in.

Legend: N blocks, P tokens a block, K KV heads, D head size, n copies, C pools (keys and values of
each layer).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from octavo.backends.triton.launch import FUSED, power_of_2
from octavo.kernels import upload

_KEPT = 16
_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@triton.jit
def block_copy_kernel(
    unit,
    sources,
    targets,
    source_blocks,
    target_blocks,
    tokens,
    s_block,
    s_token,
    s_head,
    t_block,
    t_token,
    t_head,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (copy, pool, head). unit: any tensor of the elements that are moved."""
    copy = tl.program_id(0)
    pool = tl.program_id(1)
    head = tl.program_id(2).to(tl.int64)
    element = unit.dtype
    source = tl.load(sources + pool).to(element)
    target = tl.load(targets + pool).to(element)
    source += tl.load(source_blocks + copy).to(tl.int64) * s_block + head * s_head
    target += tl.load(target_blocks + copy).to(tl.int64) * t_block + head * t_head
    d = tl.arange(0, BLOCK)
    for token in range(tl.load(tokens + copy)):
        values = tl.load(source + token * s_token + d, mask=d < SIZE)
        tl.store(target + token * t_token + d, values, mask=d < SIZE)


@dataclass(frozen=True)
class _Pools:
    """Pools of equal dtype, shape of a block and strides. bases: int64[C], their addresses."""

    bases: torch.Tensor
    unit: torch.Tensor
    strides: tuple[int, ...]


class BlockCopier:
    """Copies between blocks. The addresses of pools are kept on the device until others come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def copy(
        self,
        pools: Sequence[torch.Tensor],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> None:
        """In every pool [N, P, K, D], copy the first `tokens` int32[n] tokens of int32[n] source
        blocks to int32[n] target blocks. Copies of one call must not depend on each other."""
        self.copy_between(pools, pools, sources, targets, tokens)

    def copy_between(
        self,
        origins: Sequence[torch.Tensor],
        ends: Sequence[torch.Tensor],
        sources: NDArray[np.int32],
        targets: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> None:
        """The same from one pool to another, pair by pair, in whatever layouts. One of them may be
        pinned host memory, which the device reads and writes in place: swaps."""
        index = np.stack((sources, targets, tokens)).astype(np.int32)
        columns = upload(index, self._device)
        for pairs in _alike(origins, ends):
            first, second = ([pair[side] for pair in pairs] for side in (0, 1))
            self._launch(self._pools(first), self._pools(second), first[0].shape, columns)

    def _pools(self, caches: Sequence[torch.Tensor]) -> _Pools:
        addresses = tuple(cache.data_ptr() for cache in caches)
        if addresses not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            self._known[addresses] = upload(np.array(addresses, np.int64), self._device)
        unit = _UNITS[caches[0].element_size()]
        return _Pools(self._known[addresses], caches[0].view(unit), caches[0].stride()[:3])

    @staticmethod
    def _launch(source: _Pools, target: _Pools, shape: torch.Size, columns: torch.Tensor) -> None:
        _, _, heads, size = shape
        block_copy_kernel[(columns.shape[1], source.bases.shape[0], heads)](
            target.unit,
            source.bases,
            target.bases,
            *columns,
            *source.strides,
            *target.strides,
            SIZE=size,
            BLOCK=power_of_2(size),
            num_warps=1,
            **FUSED,
        )


def _alike(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Pairs of pools, grouped by what one launch can serve."""
    groups: dict[tuple[object, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        key = (source.dtype, source.shape[1:], source.stride(), target.stride())
        groups.setdefault(key, []).append((source, target))
    return list(groups.values())
