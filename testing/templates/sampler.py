"""Sampler `example`: the contract's formula a row at a time, in NumPy."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts import Options
from octavo.core.contracts.sampler import (
    SampledTokens,
    Sampler,
    SamplerContext,
    SamplingBatch,
    TokenLogprobs,
)
from octavo.kernels import gumbel


class ExampleOptions(Options):
    """Nothing to set yet."""


class ExampleSampler(Sampler):
    """Clear before fast: the shape to start from for one of your own."""

    def __init__(self, options: ExampleOptions, context: SamplerContext) -> None:
        self._vocab_size = context.vocab_size

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        values = logits.cpu().numpy()
        finite = ~np.isnan(values).any(1) & (values > -np.inf).any(1)
        tokens = [
            self._draw(values[row], batch, row) if finite[row] else 0
            for row in range(batch.num_rows)
        ]
        device = logits.device
        return SampledTokens(
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.from_numpy(finite).to(device),
        )

    def _draw(self, logits: NDArray[np.float32], batch: SamplingBatch, row: int) -> int:
        temperature = batch.host.temperature[row]
        if batch.all_greedy or temperature == 0:
            return int(logits.argmax())
        with np.errstate(over="ignore"):
            scaled = np.minimum(logits / temperature, np.finfo(np.float32).max)
        order = np.argsort(-scaled, kind="stable")  # equal values by token id
        order = order[scaled[order] > -np.inf][: int(batch.host.top_k[row])]
        top, weighed = float(scaled[order[0]]), scaled[order].astype(np.float64)
        if batch.host.top_p[row] < 1:
            weights = np.rint(2.0**40 * np.exp(weighed - top)).astype(np.int64)
            needed = np.ceil(float(batch.host.top_p[row]) * weights.sum())
            kept = 1 + int(np.searchsorted(weights.cumsum(), needed))
            order, weighed = order[:kept], weighed[:kept]
        if batch.host.min_p[row] > 0:
            order = order[weighed >= top + np.log(float(batch.host.min_p[row]))]
        noise = gumbel(int(batch.seed[row]), int(batch.position[row]), int(batch.index[row]), order)
        score = scaled[order] + noise
        return int(order[score == score.max()].min())

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
        values = logits.log_softmax(-1)
        best = logits.sort(dim=-1, descending=True, stable=True).indices
        chosen = token_ids[:, None]
        ids = torch.cat((chosen, best[:, :num]), dim=1)
        ranks = (best == chosen).int().argmax(1) + 1
        return TokenLogprobs(ids, values.gather(1, ids), ranks)
