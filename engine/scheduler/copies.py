"""Block copies that the next plan carries."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kv_cache_manager import BlockCopy, CopyKind

_NO_COPIES = np.empty((5, 0), np.int32)


class CopyList:
    """Copies in the order in which the KV cache manager asked for them, which is the order in which
    they must run. They wait here when nothing is planned, and go with the next plan."""

    def __init__(self) -> None:
        self._copies: list[BlockCopy] = []

    def extend(self, copies: Iterable[BlockCopy]) -> None:
        """Note copies behind those that are here."""
        self._copies.extend(copies)

    def take(self) -> tuple[NDArray[np.int32], int]:
        """All of them as a plan has them, int32[5, n], and how many go to or come from the host."""
        if not self._copies:
            return _NO_COPIES, 0
        rows = [(c.kind, c.group, c.source, c.target, c.num_tokens) for c in self._copies]
        self._copies = []
        table = np.asarray(rows, np.int32).T
        return table, int(np.count_nonzero(table[0] != CopyKind.DEVICE))
