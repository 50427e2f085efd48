"""top_k and top_p by FlashInfer's threshold searches, made exact.

The library finds, without a sort, the least value that passes. It keeps every token with that value
and adds up probabilities in float32; the contract takes ties from the lowest token id and adds up
integers. So the threshold alone is taken from the library, and integers settle which of the tokens
at the threshold pass. Where float32 put the threshold too high or too low by a few values it is
moved; of a row for which that does not suffice a kernel finds the nucleus.

Legend: r rows, V vocabulary.
"""

from __future__ import annotations

import flashinfer
import torch

from octavo.backends.triton.nucleus import cut_to_nucleus
from octavo.kernels import nucleus_weight, token_weights

_MOVES = 2


def lowest(keep: torch.Tensor, num: torch.Tensor) -> torch.Tensor:
    """bool[r, V]: the `num` int64[r, 1] lowest token ids of bool[r, V]."""
    return keep & (keep.cumsum(dim=1) <= num)


def top_k_mask(scaled: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """bool[r, V]: the top_k int32[r] (V: all) largest of scaled float32[r, V]."""
    masked = flashinfer.sampling.top_k_mask_logits(scaled, top_k)
    # -inf is what the library masks with, and what tokens that are not allowed have.
    threshold = masked.masked_fill(masked == -torch.inf, torch.inf).amin(dim=1, keepdim=True)
    above = scaled > threshold
    missing = top_k.long().unsqueeze(1) - above.sum(dim=1, keepdim=True)
    return above | lowest(scaled == threshold, missing)


def top_p_mask(scaled: torch.Tensor, keep: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Of the tokens bool[r, V], those in the nucleus top_p float32[r] (1: all)."""
    candidates = scaled.masked_fill(~keep, -torch.inf)
    top = candidates.amax(dim=1, keepdim=True)
    kept = flashinfer.sampling.top_p_renorm_probs(torch.softmax(candidates, dim=1), top_p)
    threshold = candidates.masked_fill(kept <= 0, torch.inf).amin(dim=1, keepdim=True)
    mass = token_weights(candidates, top)
    needed = nucleus_weight(mass.sum(dim=1, keepdim=True), top_p)
    for _ in range(_MOVES):
        above = _sum(mass, candidates > threshold)
        reached = _sum(mass, candidates >= threshold)
        higher = candidates.masked_fill(candidates <= threshold, torch.inf)
        lower = candidates.masked_fill(candidates >= threshold, -torch.inf)
        threshold = torch.where(above >= needed, higher.amin(dim=1, keepdim=True), threshold)
        threshold = torch.where(reached < needed, lower.amax(dim=1, keepdim=True), threshold)
    over = candidates > threshold
    at = keep & (candidates == threshold)
    above, here = _sum(mass, over), _sum(mass, at)
    settled = (above < needed) & (above + here >= needed)
    # All tokens at the threshold weigh the same.
    each = here // at.sum(dim=1, keepdim=True).clamp(min=1)
    wanted = (needed - above + each - 1) // each.clamp(min=1)
    off = (top_p >= 1).unsqueeze(1)
    found = torch.where(off, keep, over | lowest(at, wanted))
    settled |= off
    cut_to_nucleus(candidates, mass, needed, ~settled.squeeze(1))
    return torch.where(settled, found, candidates > -torch.inf)


def _sum(mass: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """int64[r, 1]."""
    return mass.masked_fill(~where, 0).sum(dim=1, keepdim=True)
