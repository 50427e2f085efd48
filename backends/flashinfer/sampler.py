"""Sampler `flashinfer`: top_k and top_p without a sort, the draw the contract's own.

FlashInfer's own samplers seed each row by its place in the batch; here the library only finds
thresholds (see `filters`), and tokens equal those of sampler `torch`. min_p, which the library has
no filter for, is one comparison. Legend: R sampling rows, r rows with a filter, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.backends.flashinfer.filters import top_k_mask, top_p_mask
from octavo.backends.triton.sampling import GumbelDraw
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import (
    SampledTokens,
    Sampler,
    SamplerContext,
    SamplingBatch,
)
from octavo.core.sampling.rows import NARROW, Rows, take_rows, ways
from octavo.core.sampling.selection import min_p_floor


class FlashInferSampler(Sampler):
    """Waits for the device only for rows with top_p, to learn whether each was settled."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self._vocab_size = context.vocab_size
        self._draw = GumbelDraw(context.max_num_seqs, context.vocab_size, context.device)
        self._greedy = torch.zeros(context.max_num_seqs, device=context.device)
        self._ones = torch.ones(context.max_num_seqs, device=context.device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        temperature = self._greedy[: batch.num_rows] if batch.all_greedy else batch.temperature
        drawn = self._draw(logits, temperature, batch.seed, batch.position, batch.index)
        token_ids, valid = (values.clone() for values in drawn)
        if batch.all_greedy:
            return SampledTokens(token_ids, valid)
        found = ways(batch, self._vocab_size)
        plain = found.plain[batch.host.min_p[found.plain] > 0]
        rows = np.sort(np.concatenate([plain, *(part for part, _ in found.filtered)]))
        if rows.size:
            index = torch.from_numpy(rows).to(logits.device, non_blocking=True)
            part = take_rows(logits, batch, rows)
            # Rows that are not valid keep their token; what they hold must not trouble the library.
            part.scaled.masked_fill_(~valid[index].unsqueeze(1), 0.0)
            token_ids[index] = torch.where(valid[index], self._filtered(part), token_ids[index])
        return SampledTokens(token_ids, valid)

    def _filtered(self, part: Rows) -> torch.Tensor:
        """int64[r]"""
        scaled, keep = part.scaled, torch.ones_like(part.scaled, dtype=torch.bool)
        if part.any_top_k:
            keep = top_k_mask(scaled, part.top_k.clamp(max=self._vocab_size))
        settled = None
        if part.any_top_p:
            keep, settled = top_p_mask(scaled, keep, part.top_p)
        if part.any_min_p:
            keep &= scaled >= min_p_floor(scaled.amax(dim=1, keepdim=True), part.min_p)
        keys = part.keys
        chosen = self._draw(
            scaled.masked_fill(~keep, -torch.inf),
            self._ones[: len(scaled)],
            keys.seed,
            keys.position,
            keys.index,
        )[0].clone()
        if settled is not None:
            open_rows = (~settled).nonzero().squeeze(1)
            if len(open_rows):
                rest = part.subset(open_rows)
                width = int(rest.top_k.max()) if rest.any_top_k else NARROW
                chosen[open_rows] = rest.draw_of_top(min(self._vocab_size, width))
        return chosen
