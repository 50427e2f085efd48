"""What bounds a step, and what is kept of it until its result comes.

Legend: B rows of the step's batch, R rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.engine.scheduler.preemption_log import PreemptionLog


@dataclass(frozen=True)
class SchedulerLimits:
    """max_num_seqs: slots. max_num_batched_tokens: tokens a step. max_chunk_tokens: of one prompt a
    step. chunked_prefill: False computes each prompt in one step. max_model_len: tokens of a
    sequence. vocab_size: V."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    block_size: int = 16
    max_chunk_tokens: int | None = None
    chunked_prefill: bool = True


@dataclass(slots=True)
class InFlight:
    """What `commit` needs to know of a planned step. slots intp[B], computed int64[B] tokens whose
    KV the step completes. handles, sampled_slots, positions [R]: whose token, at which index of the
    sequence; the first `num_decodes` decode. departures: how many sequences had left their slot by
    then. num_host_copies of its num_copies block copies go to or come from the host. log: what was
    preempted and swapped in for it. ending: slots planned to their last token. deferred: slots
    given up since, free once this step is committed."""

    step: int
    slots: NDArray[np.intp]
    computed: NDArray[np.int64]
    handles: NDArray[np.int64]
    sampled_slots: NDArray[np.intp]
    positions: NDArray[np.int64]
    num_decodes: int
    num_prefill_tokens: int
    departures: int
    num_copies: int
    num_host_copies: int
    log: PreemptionLog
    ending: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
