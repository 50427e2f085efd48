"""Sampler `triton`: the draw over the whole vocabulary in kernels, without sort and without waiting
for the device. Rows with top_k or top_p are drawn from the largest tokens, as in the reference; for
those whose nucleus is wider a kernel finds it.

Legend: R sampling rows, r rows with a filter, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.backends.triton.nucleus import cut_to_nucleus
from octavo.backends.triton.sampling import GumbelDraw
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import (
    SampledTokens,
    Sampler,
    SamplerContext,
    SamplingBatch,
)
from octavo.kernels import RowGroups, SamplingRows, group_rows, select_rows, upload


class DrawingSampler(Sampler):
    """Rows that are greedy or have no filter run in three launches; the others by
    `_draw_filtered`. The host never waits for the device."""

    captures = True

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self._vocab_size = context.vocab_size
        self._draw = GumbelDraw(context.max_num_seqs, context.vocab_size, context.device)
        self._greedy = torch.zeros(context.max_num_seqs, device=context.device)
        self._ones = torch.ones(context.max_num_seqs, device=context.device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        # Of greedy batches nothing but the flag is written; temperature 0 keeps the rest unread.
        temperature = self._greedy[: batch.num_rows] if batch.all_greedy else batch.temperature
        drawn = self._draw(logits, temperature, batch.seed, batch.position, batch.index)
        token_ids, valid = (values.clone() for values in drawn)
        if batch.all_greedy:
            return SampledTokens(token_ids, valid)
        groups = group_rows(batch, self._vocab_size)
        min_p = groups.unfiltered[batch.host.min_p[groups.unfiltered] > 0]
        for rows, width in self._filtered_rows(groups, min_p):
            if rows.size:
                index = upload(rows, logits.device)
                group, good = select_rows(logits, batch, rows), valid[index]
                chosen = self._draw_filtered(group, width, good)
                token_ids[index] = torch.where(good, chosen, token_ids[index])
        return SampledTokens(token_ids, valid)

    @abstractmethod
    def _filtered_rows(
        self, groups: RowGroups, min_p: NDArray[np.intp]
    ) -> list[tuple[NDArray[np.intp], int]]:
        """Rows that are filtered together, and how many candidates they have (0: all), from those
        with top_k or top_p and those with min_p alone."""

    @abstractmethod
    def _draw_filtered(self, group: SamplingRows, width: int, valid: torch.Tensor) -> torch.Tensor:
        """int64[r] tokens. valid: bool[r]; the token of a row that is not is not looked at."""

    def _draw_all(
        self, group: SamplingRows, scaled: torch.Tensor, where: torch.Tensor
    ) -> torch.Tensor:
        """int64[r], from the whole of scaled float32[r, V], -inf masked; greedily where float32[r]
        is 0, which costs next to nothing."""
        keys = group.keys
        return self._draw(scaled, where, keys.seed, keys.position, keys.index)[0].clone()


class TritonSampler(DrawingSampler):
    """See the module."""

    def _filtered_rows(
        self, groups: RowGroups, min_p: NDArray[np.intp]
    ) -> list[tuple[NDArray[np.intp], int]]:
        return [*groups.filtered, (min_p, 0)]

    def _draw_filtered(self, group: SamplingRows, width: int, valid: torch.Tensor) -> torch.Tensor:
        scaled, rows = group.scaled, len(group.scaled)
        if not width:
            return self._draw_all(group, group.apply_min_p(), self._ones[:rows])
        chosen, wide = group.draw_candidates(width)
        if wide is None:
            return chosen
        cut_to_nucleus(scaled, wide.weights, wide.needed, wide.rows)
        if group.any_min_p:
            scaled = group.apply_min_p()
        return torch.where(wide.rows, self._draw_all(group, scaled, wide.rows.float()), chosen)
