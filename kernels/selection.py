"""Which tokens may be drawn: top_k, top_p and min_p, as the sampler contract defines them.

Legend: r rows, K candidates, V vocabulary. Nothing here adds floats up, so a row's result does not
depend on the other rows, nor on how a device orders its sums.
"""

from __future__ import annotations

import torch

_WEIGHT_ONE = 2.0**40


def token_weights(scaled: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """int64[r, K] fixed-point weights of scaled float32[r, K]; `top` float32[r, 1] weighs 2**40."""
    relative = scaled.double() - top.double()
    return (relative.exp_() * _WEIGHT_ONE).round_().long()


def nucleus_weight(total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """int64[r, 1]: the weight that the nucleus must reach, of int64[r, 1] and float32[r]."""
    return (top_p.double().unsqueeze(1) * total.double()).ceil().long()


def nucleus_mask(
    descending: torch.Tensor, needed: torch.Tensor, top_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of weights int64[r, K] in descending order: bool[r, K] whether each is in the shortest run
    that reaches int64[r, 1], and bool[r] whether that run ends within the K."""
    mass = descending.cumsum(dim=1)
    off = (top_p >= 1).unsqueeze(1)
    return ((mass - descending) < needed) | off, mass[:, -1] >= needed[:, 0]


def min_p_floor(top: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """float32[r, 1]: the least float32 that min_p float32[r] lets pass, for the largest scaled
    value `top` float32[r, 1] of each row; -inf where min_p is off."""
    exact = top.double() + min_p.double().log().unsqueeze(1)
    rounded = exact.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < exact, above, rounded)
