"""Rotary position embedding (Su et al., 2021), computed in float32.

Legend: T tokens, H heads, D head size, R rotated dimensions, L longest sequence.
"""

from __future__ import annotations

import torch


class RopeTable:
    """A model's table made ready for `apply_rope`: every cosine and sine stands at the dimension
    that it multiplies, the sines with the sign of their term.

    cos_sin: float32[L, R], R / 2 cosines then R / 2 sines.
    """

    def __init__(self, cos_sin: torch.Tensor, interleaved: bool) -> None:
        cos, sin = cos_sin.float().chunk(2, dim=-1)
        if interleaved:
            full_cos = cos.repeat_interleave(2, dim=-1)
            full_sin = torch.stack((-sin, sin), dim=-1).flatten(-2)
        else:
            full_cos = torch.cat((cos, cos), dim=-1)
            full_sin = torch.cat((-sin, sin), dim=-1)
        self._table = torch.stack((full_cos, full_sin), dim=1)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each float32[T, 1, R], at int64[T] positions."""
        cos, sin = self._table.index_select(0, positions).unsqueeze(2).unbind(1)
        return cos, sin


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Rotate the leading R dimensions of x[T, H, D] by the rows of a `RopeTable`.

    Dimension i is paired with i + R / 2 (rotate-half), or 2i with 2i + 1 (interleaved).
    """
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        head = apply_rope(x[..., :rotated], cos, sin, interleaved=interleaved)
        return torch.cat((head, x[..., rotated:]), dim=-1)
    wide = x.float()
    if interleaved:
        partner = wide.reshape(*wide.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        partner = wide.roll(rotated // 2, -1)
    return torch.addcmul(wide * cos, partner, sin).to(x.dtype)
