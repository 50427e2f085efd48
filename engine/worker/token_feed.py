"""How sampled tokens reach the next step while the host does not know them yet.

In the mirror such a token stands as `placeholder(slot)`, a negative number, and so it comes into
a batch's token ids. There it is replaced on the device by what was sampled last for that slot.
Legend: S slots, R rows that sampled, T tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.engine.worker.sampling_step import LaunchedDraw
from octavo.kernels import upload


class TokenFeed:
    """The token sampled last for every slot, on the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def fill(
        self,
        token_ids: torch.Tensor,
        slots: NDArray[np.intp],
        unfinished: Sequence[LaunchedDraw],
        *,
        decodes_only: bool,
    ) -> None:
        """Replace the placeholders in int64[T], in place. slots: intp[B], the batch's. unfinished:
        steps whose tokens the host does not have, oldest first."""
        if not unfinished:
            return
        newest = unfinished[-1]
        if decodes_only and np.array_equal(newest.slots, slots):
            # The usual step: every row goes on with the token that it has just sampled.
            token_ids[: len(slots)].copy_(newest.token_ids)
            return
        device = token_ids.device
        for launched in unfinished:
            if not launched.fed:
                launched.fed = True
                self._last.index_copy_(0, upload(launched.slots, device), launched.token_ids)
        waiting = token_ids < 0
        sampled = self._last.index_select(0, (-1 - token_ids).clamp_(min=0))
        token_ids.copy_(torch.where(waiting, sampled, token_ids))
