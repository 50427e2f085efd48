"""Sampler `flashinfer`: top_k and top_p without a sort, the draw the contract's own.

FlashInfer's own samplers seed each row by its place in the batch; here the library only finds
thresholds (see `filters`), and tokens equal those of sampler `torch`. min_p, which the library has
no filter for, is one comparison. Legend: r rows with a filter, V vocabulary.
"""

from __future__ import annotations

import flashinfer
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.flashinfer.filters import top_k_mask, top_p_mask
from octavo.backends.flashinfer.support import load
from octavo.backends.triton.sampler import DrawingSampler
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SamplerContext
from octavo.kernels import RowGroups, SamplingRows, min_p_floor


class FlashInferSampler(DrawingSampler):
    """All rows with a filter go together. The host never waits for the device."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        load(flashinfer.sampling.get_sampling_module)
        super().__init__(options, context)

    def _filtered_rows(
        self, groups: RowGroups, min_p: NDArray[np.intp]
    ) -> list[tuple[NDArray[np.intp], int]]:
        return [(np.sort(np.concatenate([min_p, *(rows for rows, _ in groups.filtered)])), 0)]

    def _draw_filtered(self, group: SamplingRows, width: int, valid: torch.Tensor) -> torch.Tensor:
        # What rows hold that are not valid must not trouble the library.
        scaled = group.scaled.masked_fill_(~valid.unsqueeze(1), 0.0)
        keep = torch.ones_like(scaled, dtype=torch.bool)
        if group.any_top_k:
            keep = top_k_mask(scaled, group.top_k.clamp(max=self._vocab_size))
        if group.any_top_p:
            keep = top_p_mask(scaled, keep, group.top_p)
        if group.any_min_p:
            keep &= scaled >= min_p_floor(scaled.amax(dim=1, keepdim=True), group.min_p)
        return self._draw_all(
            group, scaled.masked_fill(~keep, -torch.inf), self._ones[: len(scaled)]
        )
