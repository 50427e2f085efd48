"""Sampler `torch`: the reference, on any device. See `octavo.kernels.SamplingRows`."""

from __future__ import annotations

import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import (
    SampledTokens,
    Sampler,
    SamplerContext,
    SamplingBatch,
    TokenLogprobs,
)
from octavo.kernels import argmax, group_rows, select_rows, token_logprobs, upload


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
        groups = group_rows(batch, self._vocab_size)
        for rows, width in (*groups.filtered, (groups.unfiltered, 0)):
            if not rows.size:
                continue
            group = select_rows(logits, batch, rows)
            chosen = group.draw() if width == 0 else group.draw_top(width)
            token_ids[upload(rows, logits.device)] = chosen
        return SampledTokens(token_ids, valid)

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
        return token_logprobs(logits, token_ids, num)
