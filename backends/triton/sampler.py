"""Sampler `triton`: the draw over the whole vocabulary in kernels, without sort and without waiting
for the device. Rows with top_k or top_p go the reference's way."""

from __future__ import annotations

import torch

from octavo.backends.triton.sampling import GumbelDraw
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import (
    SampledTokens,
    Sampler,
    SamplerContext,
    SamplingBatch,
)
from octavo.core.sampling.rows import take_rows, ways


class TritonSampler(Sampler):
    """Batches of rows that are greedy or have no filter run in three launches."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self._vocab_size = context.vocab_size
        self._draw = GumbelDraw(context.max_num_seqs, context.vocab_size, context.device)
        self._greedy = torch.zeros(context.max_num_seqs, device=context.device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        # Of greedy batches nothing but the flag is written; temperature 0 keeps the rest unread.
        temperature = self._greedy[: batch.num_rows] if batch.all_greedy else batch.temperature
        drawn = self._draw(logits, temperature, batch.seed, batch.position, batch.index)
        token_ids, valid = (values.clone() for values in drawn)
        if batch.all_greedy:
            return SampledTokens(token_ids, valid)
        found = ways(batch, self._vocab_size)
        parts = list(found.filtered)
        plain = found.plain[batch.host.min_p[found.plain] > 0]
        if plain.size:
            parts.append((plain, 0))
        for rows, width in parts:
            part = take_rows(logits, batch, rows)
            chosen = part.draw() if width == 0 else part.draw_of_top(width)
            token_ids[torch.from_numpy(rows).to(logits.device, non_blocking=True)] = chosen
        return SampledTokens(token_ids, valid)
