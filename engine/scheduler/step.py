"""What bounds a step, and what is kept of a planned step until its result comes.

Legend: B rows of the step's batch, R rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.observer import PreemptionRecord


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of the scheduler, fixed at start."""

    max_num_seqs: int
    """Slots: sequences that can run at the same time."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    max_model_len: int
    """Tokens of one sequence, prompt and output together."""
    vocab_size: int
    block_size: int = 16
    """Tokens in one KV cache block."""
    max_chunk_tokens: int | None = None
    """Tokens of one prompt computed in one step. None: as many as the step allows."""
    chunked_prefill: bool = True
    """Whether a prompt may be spread over several steps."""


class PreemptionLog(NamedTuple):
    """Preemptions and swap-ins since the previous plan."""

    records: tuple[PreemptionRecord, ...] = ()
    """Sequences that were preempted."""
    swapped_in: tuple[int, ...] = ()
    """Handles of sequences that were brought back from the host pool."""


NOTHING_PREEMPTED = PreemptionLog()


@dataclass(slots=True)
class PendingStep:
    """A step that has been planned but not committed yet. Decoding rows come first."""

    step: int
    slots: NDArray[np.intp]
    """intp[B]: the slot of each row."""
    batch: NDArray[np.int32]
    """int32[B]: the same, as the plan carries it."""
    counts: NDArray[np.int32]
    """int32[B]: tokens that each row computes."""
    computed: NDArray[np.int64]
    """int64[B]: tokens of each row whose KV exists after the step."""
    sample_rows: NDArray[np.int32]
    """int32[R]: rows that sample, ascending."""
    sampled_slots: NDArray[np.intp]
    """intp[R]: the slots of these rows."""
    handles: NDArray[np.int64]
    """int64[R]: the sequences of these rows."""
    positions: NDArray[np.int64]
    """int64[R]: index in its sequence of the token that each of these rows samples."""
    num_decodes: int
    num_prefill_tokens: int
    num_vacated: int
    """`SlotTable.num_vacated` when the step was planned."""
    log: PreemptionLog = NOTHING_PREEMPTED
    num_copies: int = 0
    """Block copies in the plan."""
    num_host_copies: int = 0
    """Those of them to or from the host pool."""
    ending: list[int] = field(default_factory=list)
    """Slots whose sequence reaches its maximum length with this step."""
    deferred: list[int] = field(default_factory=list)
    """Slots vacated since, to be freed when this step is committed."""
