"""Logprobs of sampled tokens and of prompt tokens, as the columns that travel to the front end.

Legend: R sampling rows, m rows that want logprobs, k alternatives, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.sampler import Sampler
from octavo.core.messages import Int32, Logprobs, PromptLogprobs, StepPlan
from octavo.engine.worker.batch import StepBatch
from octavo.engine.worker.mirror import Mirror
from octavo.engine.worker.sampling_state import SamplingState
from octavo.engine.worker.transfer import HostCopy
from octavo.kernels import token_logprobs, upload

_SLICE_BYTES = 32 * 2**20
"""Logits that are held at once for prompt logprobs."""


class LogprobColumns:
    """Logprobs on their way to the host: `Logprobs` of m tokens, some of which may be left out."""

    def __init__(
        self,
        sampler: Sampler,
        raw: torch.Tensor,
        token_ids: torch.Tensor,
        rows: NDArray[np.int32],
        num: NDArray[np.int32],
    ) -> None:
        """Describe int64[m] tokens by their raw float32[m, V] logits. num: int32[m] alternatives
        that each wants."""
        most = int(num.max())
        found = sampler.logprobs(raw, token_ids, most)
        if found is None:
            found = token_logprobs(raw, token_ids, most)
        self.rows, self._num = rows, num
        self._copy = HostCopy((found.token_ids, found.values, found.ranks))

    def take(self, kept: NDArray[np.bool_] | None = None) -> Logprobs:
        """Wait for them. kept: bool[m], the rows that are wanted; None: all."""
        token_ids, values, ranks = self._copy.wait()
        where = slice(None) if kept is None else kept
        return Logprobs(
            rows=self.rows[where].astype(np.int32),
            token_ids=token_ids[where].astype(np.int32),
            values=values[where].astype(np.float32),
            ranks=ranks[where].astype(np.int32),
            num=self._num[where].astype(np.int32),
        )


@dataclass(frozen=True)
class PendingPromptLogprobs:
    """A chunk's prompt logprobs, in slices."""

    handle: int
    start: int
    parts: list[LogprobColumns]

    def take(self) -> PromptLogprobs:
        """Wait for them."""
        taken = [part.take() for part in self.parts]
        columns = taken[0]
        if len(taken) > 1:
            columns = Logprobs(
                **{
                    name: np.concatenate([getattr(part, name) for part in taken])
                    for name in Logprobs.__struct_fields__
                }
            )
        return PromptLogprobs(handle=self.handle, start=self.start, logprobs=columns)


class PromptLogprobsCollector:
    """Finds the prompt tokens that a step's hidden states describe: the logits at position p are
    those of token p + 1."""

    def __init__(
        self,
        mirror: Mirror,
        state: SamplingState,
        sampler: Sampler,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self._mirror, self._state, self._sampler = mirror, state, sampler
        self._compute_logits = compute_logits

    def collect(
        self, plan: StepPlan, batch: StepBatch, hidden: torch.Tensor
    ) -> list[PendingPromptLogprobs]:
        """Of every row that wants them, chunk by chunk. hidden: [T, E]. Called after the mirror
        has advanced."""
        if not self._state.any_prompt_logprobs:
            return []
        wanted = self._state.num_prompt_logprobs(batch.slots)
        found = []
        for row in np.flatnonzero(wanted >= 0).tolist():
            slot, count = int(batch.slots[row]), int(plan.counts[row])
            first = int(self._mirror.num_computed[slot]) - count
            described = min(count, int(self._mirror.num_prompt[slot]) - 1 - first)
            if described <= 0:
                continue
            begin = int(batch.last[row]) + 1 - count
            found.append(
                PendingPromptLogprobs(
                    handle=int(self._mirror.handles[slot]),
                    start=first + 1,
                    parts=self._describe(
                        hidden[begin : begin + described],
                        self._mirror.token_ids[slot, first + 1 : first + 1 + described],
                        first + 1,
                        int(wanted[row]),
                    ),
                )
            )
        return found

    def _describe(
        self, hidden: torch.Tensor, token_ids: Int32, start: int, num: int
    ) -> list[LogprobColumns]:
        """In slices, so that memory does not grow with the chunk."""
        size = max(1, _SLICE_BYTES // (4 * self._state.vocab_size))
        parts = []
        for begin in range(0, len(token_ids), size):
            part = token_ids[begin : begin + size]
            parts.append(
                LogprobColumns(
                    self._sampler,
                    self._compute_logits(hidden[begin : begin + size]),
                    upload(part.astype(np.int64), hidden.device),
                    np.arange(start + begin, start + begin + len(part), dtype=np.int32),
                    np.full(len(part), num, np.int32),
                )
            )
        return parts
