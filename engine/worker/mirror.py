"""`Mirror`: what the worker knows of every slot, kept up by plans alone.

Legend: S slots, L longest sequence, G KV groups, M blocks a slot at most.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.messages import AdmittedRow, Int32, StepPlan

_LINE = 16
"""int32 values in a cache line."""

_SLACK_TOKENS = 8
"""Room behind the longest sequence, for tokens of a step in flight that nobody keeps."""


def odd_lines(length: int) -> int:
    """A row stride of an odd number of cache lines: rows a power of two apart would share cache
    sets, and a scatter to one column of all rows is then several times slower."""
    lines = -(-length // _LINE)
    return (lines | 1) * _LINE


def placeholder(slots: NDArray[np.intp]) -> NDArray[np.intp]:
    """What stands for the token that was sampled last for a slot, until it is known: a number that
    is no token id, and from which the slot follows."""
    return -1 - slots


class Mirror:
    """State of all slots as arrays.

    token_ids: int32[S, >= L], every token of a slot; last_token: int64[S], the last one of each;
    a `placeholder` where it is not known yet. num_tokens, num_computed, num_prompt:
    int64[S], how many are known, how many have their KV, how many the caller sent.
    block_tables: int32[G, S, M], 0 (the null block) beyond what a slot was given. num_columns: of
    them those that a slot was ever given a block in, from the first on.
    handles: int64[S], the engine's handle of the sequence in each slot, -1 in a free one.
    num_advances: calls of `advance` so far.
    """

    def __init__(
        self, *, num_slots: int, max_model_len: int, block_size: int, num_groups: int = 1
    ) -> None:
        self.num_slots, self.max_model_len = num_slots, max_model_len
        self.block_size, self.num_groups = block_size, num_groups
        # calloc: pages that no sequence reaches are never touched.
        self.token_ids = np.zeros(
            (num_slots, odd_lines(max_model_len + _SLACK_TOKENS)), dtype=np.int32
        )
        self.last_token = np.zeros(num_slots, dtype=np.int64)
        self.num_advances = 0
        self.num_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_computed = np.zeros(num_slots, dtype=np.int64)
        self.num_prompt = np.zeros(num_slots, dtype=np.int64)
        self.handles = np.full(num_slots, -1, dtype=np.int64)
        max_blocks = -(-(max_model_len + _SLACK_TOKENS) // block_size)
        self.block_tables = np.zeros((num_groups, num_slots, odd_lines(max_blocks)), dtype=np.int32)
        self.num_columns = 0
        self.flat_token_ids = self.token_ids.reshape(-1)
        self.token_stride = self.token_ids.shape[1]

    def apply(self, plan: StepPlan) -> None:
        """Take over the slots, tokens and blocks that a plan changes (copies are the pool's)."""
        if plan.released.size:
            self.num_tokens[plan.released] = 0
            self.num_computed[plan.released] = 0
            self.handles[plan.released] = -1
        for row in plan.admitted:
            self._admit(row)
        if plan.appended.size:
            group, slot, index = plan.appended[:3].astype(np.intp)
            self.block_tables[group, slot, index] = plan.appended[3]
            # A few numbers: NumPy would take three times as long.
            self.num_columns = max(self.num_columns, max(plan.appended[2].tolist()) + 1)

    def clear(self) -> None:
        """Forget every slot."""
        self.num_tokens[:] = self.num_computed[:] = 0
        self.handles[:] = -1
        self.block_tables[:] = 0
        self.num_columns = 0

    def _admit(self, row: AdmittedRow) -> None:
        slot, known = row.slot, len(row.token_ids)
        if known > self.max_model_len:
            raise ValueError(
                f"slot {slot} was given {known} tokens, the longest sequence has "
                f"{self.max_model_len}"
            )
        self.token_ids[slot, :known] = row.token_ids
        self.last_token[slot] = row.token_ids[-1]
        self.num_tokens[slot] = known
        self.num_computed[slot] = row.num_computed
        self.num_prompt[slot] = row.num_prompt
        self.handles[slot] = row.handle
        self.block_tables[:, slot] = 0
        given = row.blocks.shape[1]
        self.block_tables[:, slot, :given] = row.blocks
        self.num_columns = max(self.num_columns, given)

    def advance(self, slots: NDArray[np.intp], counts: Int32) -> None:
        """The next `counts[i]` tokens of `slots[i]` now have their KV."""
        self.num_computed[slots] += counts
        self.num_advances += 1

    def reserve(self, slots: NDArray[np.intp]) -> NDArray[np.intp]:
        """A token for each of the slots that was sampled and is not known here: `placeholder`
        stands for it. Where, for `settle`."""
        index = self.num_tokens[slots]
        places = slots * self.token_stride + index
        self.num_tokens[slots] = index + 1
        self.flat_token_ids[places] = self.last_token[slots] = placeholder(slots)
        return places

    def settle(self, slots: NDArray[np.intp], places: NDArray[np.intp], token_ids: Int32) -> None:
        """The reserved tokens are these. A slot may have got another one since."""
        self.flat_token_ids[places] = token_ids
        last = places == slots * self.token_stride + self.num_tokens[slots] - 1
        self.last_token[slots[last]] = token_ids[last]

    def append(self, slots: NDArray[np.intp], token_ids: Int32) -> None:
        """One sampled token for each of the slots."""
        index = self.num_tokens[slots]
        self.flat_token_ids[slots * self.token_stride + index] = token_ids
        self.num_tokens[slots] = index + 1
        self.last_token[slots] = token_ids
