"""Rows of a batch that are sampled the same way.

Groups, each as cheap as its own parameters allow:

    greedy          argmax, nothing else
    top_k           the k largest (a partition, not a sort of the vocabulary), then top_p, min_p
                    and noise on these alone
    top_p alone     the same with the 1024 largest; rows whose nucleus is wider sort everything
    neither         noise on the whole vocabulary (on a CPU where a token can still win)

The group of a row never changes its token: ties, weights and noise are defined per token.
Legend: R sampling rows, r rows of one group, K candidates, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.sampler import SamplingBatch
from octavo.kernels.noise import DrawKeys, draw_all, noise_at
from octavo.kernels.selection import min_p_floor, nucleus_mask, nucleus_weight, token_weights
from octavo.kernels.token_order import top_tokens
from octavo.kernels.transfer import upload

NARROW = 1024
"""Candidates of rows with top_p and no top_k."""

_FOUR = 4  # tokens of a block whose noise costs as much as that of one candidate
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RowGroups:
    """Rows that can be sampled together. Those in no group are greedy."""

    filtered: list[tuple[NDArray[np.intp], int]]
    """(rows intp, number of candidates) of those with top_k or top_p."""
    unfiltered: NDArray[np.intp]
    """Rows drawn from the whole vocabulary, perhaps with min_p."""


def group_rows(batch: SamplingBatch, vocab_size: int) -> RowGroups:
    """From the host's columns, without waiting for the device."""
    host = batch.host
    drawn = host.temperature > 0
    top_k = drawn & (host.top_k < vocab_size)
    narrow = top_k & (host.top_k <= NARROW)
    top_p = drawn & ~top_k & (host.top_p < 1)
    filtered = []
    for mask in (narrow, top_k & ~narrow):
        rows = mask.nonzero()[0]
        if rows.size:
            filtered.append((rows, int(host.top_k[rows].max())))
    rows = top_p.nonzero()[0]
    if rows.size:
        filtered.append((rows, min(NARROW, vocab_size)))
    return RowGroups(filtered, (drawn & ~top_k & ~top_p).nonzero()[0])


@dataclass(frozen=True)
class WideNucleus:
    """Rows whose nucleus does not end within the candidates, and what decides where it ends."""

    rows: torch.Tensor
    """bool[r]"""
    weights: torch.Tensor
    """int64[r, V], of all tokens."""
    needed: torch.Tensor
    """int64[r, 1], what the nucleus must weigh."""


@dataclass(slots=True)
class SamplingRows:
    """Rows of one group."""

    scaled: torch.Tensor
    """float32[r, V]: logits / temperature."""
    keys: DrawKeys
    top_k: torch.Tensor
    """int32[r]"""
    top_p: torch.Tensor
    """float32[r]"""
    min_p: torch.Tensor
    """float32[r]"""
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool

    def draw(self) -> torch.Tensor:
        """int64[r], from the whole vocabulary."""
        return draw_all(self.apply_min_p() if self.any_min_p else self.scaled, self.keys)

    def apply_min_p(self) -> torch.Tensor:
        """float32[r, V] scaled, with -inf where min_p does not let pass, in place."""
        floor = min_p_floor(self.scaled.amax(dim=1, keepdim=True), self.min_p)
        return self.scaled.masked_fill_(self.scaled < floor, -torch.inf)

    def draw_top(self, width: int) -> torch.Tensor:
        """int64[r], from the `width` largest; rows with top_p and without top_k whose nucleus is
        wider draw from all. Waits for the device to learn which those are, when there is top_p and
        no top_k."""
        chosen, wide = self.draw_candidates(width)
        if wide is not None:
            rows = wide.rows.nonzero().squeeze(1)
            if len(rows):
                chosen[rows] = self.subset(rows).draw_top(self.scaled.shape[1])
        return chosen

    def draw_candidates(self, width: int) -> tuple[torch.Tensor, WideNucleus | None]:
        """int64[r], from the `width` largest, and the rows whose token has to be drawn from more;
        None when there are none."""
        token_ids = top_tokens(self.scaled, width)
        values = self.scaled.gather(1, token_ids)
        top = values[:, :1]
        keep = torch.arange(width, device=values.device) < self.top_k.unsqueeze(1)
        wide = None
        if self.any_top_p:
            mass = token_weights(values, top).masked_fill_(~keep, 0)
            narrowed = not self.any_top_k and width < self.scaled.shape[1]
            everything = token_weights(self.scaled, top) if narrowed else mass
            needed = nucleus_weight(everything.sum(dim=1, keepdim=True), self.top_p)
            nucleus, complete = nucleus_mask(mass, needed, self.top_p)
            keep &= nucleus
            wide = WideNucleus(~complete, everything, needed) if narrowed else None
        if self.any_min_p:
            keep &= values >= min_p_floor(top, self.min_p)
        values.masked_fill_(~keep, -torch.inf)
        if width * _FOUR > self.scaled.shape[1]:
            chosen = draw_all(
                torch.full_like(self.scaled, -torch.inf).scatter_(1, token_ids, values), self.keys
            )
        else:
            chosen = _lowest_best(values + noise_at(self.keys, token_ids), token_ids)
        return chosen, wide

    def subset(self, rows: torch.Tensor) -> SamplingRows:
        keys = DrawKeys(self.keys.seed[rows], self.keys.position[rows], self.keys.index[rows])
        columns = (self.top_k[rows], self.top_p[rows], self.min_p[rows])
        flags = (self.any_top_k, self.any_top_p, self.any_min_p)
        return SamplingRows(self.scaled[rows], keys, *columns, *flags)


def select_rows(logits: torch.Tensor, batch: SamplingBatch, rows: NDArray[np.intp]) -> SamplingRows:
    """Rows intp[r] of a batch. Of everything, `logits` is changed in place."""
    index = None  # everything: no copy of the logits
    if len(rows) < batch.num_rows:
        index = upload(rows, logits.device)

    def select(column: torch.Tensor) -> torch.Tensor:
        return column if index is None else column[index]

    scaled = select(logits).div_(select(batch.temperature).unsqueeze(1)).clamp_(max=_LARGEST)
    host = batch.host
    return SamplingRows(
        scaled,
        DrawKeys(select(batch.seed), select(batch.position), select(batch.index)),
        select(batch.top_k),
        select(batch.top_p),
        select(batch.min_p),
        any_top_k=bool((host.top_k[rows] < logits.shape[1]).any()),
        any_top_p=bool((host.top_p[rows] < 1).any()),
        any_min_p=bool((host.min_p[rows] > 0).any()),
    )


def _lowest_best(score: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int64[r]: the lowest of the token ids int64[r, K] with the best score float32[r, K]."""
    best = score.amax(dim=1, keepdim=True)
    # A row with NaN has no best score; it is not valid, and any token id serves.
    return token_ids.masked_fill(score < best, torch.iinfo(torch.int64).max).amin(dim=1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64[R], the first of equal ones. NumPy's is ten times as fast as torch's on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)
