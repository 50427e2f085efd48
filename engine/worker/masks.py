"""Masks of host logits processors, applied to logits.

Legend: R sampling rows, m masked rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.messages import LogitMasks
from octavo.kernels import upload


def apply_masks(logits: torch.Tensor, masks: LogitMasks) -> None:
    """Set what the bitmask forbids to -inf in float32[R, V], in place."""
    if not masks.rows.size:
        return
    device, vocab_size = logits.device, logits.shape[1]
    words = upload(masks.bitmask, device)
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    forbidden = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, :vocab_size] == 0
    rows = upload(masks.rows.astype(np.int64), device)
    logits[rows] = logits[rows].masked_fill(forbidden, float("-inf"))
