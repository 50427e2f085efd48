"""Masks of host logits processors, applied to logits.

Legend: R sampling rows, m masked rows, V vocabulary.
"""

from __future__ import annotations

import torch

from octavo.core.messages import LogitMasks


def apply_masks(logits: torch.Tensor, masks: LogitMasks) -> None:
    """Set what the bitmask forbids to -inf in float32[R, V], in place."""
    if not masks.rows.size:
        return
    device, vocab_size = logits.device, logits.shape[1]
    words = torch.tensor(masks.bitmask, device=device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    forbidden = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab_size] == 0
    rows = torch.tensor(masks.rows, dtype=torch.int64, device=device)
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
