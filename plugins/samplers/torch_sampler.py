"""Sampler `torch`: the reference, on any device. See `octavo.kernels.rows`."""

from __future__ import annotations

import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SampledTokens, Sampler, SamplerContext, SamplingBatch
from octavo.kernels.rows import argmax, take_rows, ways
from octavo.kernels.upload import upload


class TorchSampler(Sampler):
    """Waits for the device only when rows have top_p and no top_k, to learn whose nucleus is wider
    than the candidates. `triton` and `flashinfer` never wait."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self._vocab_size = context.vocab_size

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        token_ids = argmax(logits)
        top = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        valid = top > -torch.inf  # argmax finds a NaN where there is one, and NaN compares false
        if batch.all_greedy:
            return SampledTokens(token_ids, valid)
        found = ways(batch, self._vocab_size)
        for rows, width in (*found.filtered, (found.plain, 0)):
            if not rows.size:
                continue
            part = take_rows(logits, batch, rows)
            chosen = part.draw() if width == 0 else part.draw_of_top(width)
            token_ids[upload(rows, logits.device)] = chosen
        return SampledTokens(token_ids, valid)
