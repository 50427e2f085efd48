"""A plan made by hand, for passes that measure."""

from __future__ import annotations

import numpy as np

from octavo.core.messages import AdmittedRow, StepPlan
from octavo.core.sampling_params import SamplingParams
from octavo.engine.worker.mirror import Mirror


def probe_plan(num_tokens: int, mirror: Mirror, vocab_size: int) -> StepPlan:
    """Prefill of `num_tokens` prompt tokens, in rows as long as a sequence may be, on blocks from 1
    on. No row samples."""
    longest = mirror.max_model_len
    counts = [longest] * (num_tokens // longest)
    if num_tokens % longest:
        counts.append(num_tokens % longest)
    admitted, next_block = [], 1
    for slot, count in enumerate(counts):
        blocks = -(-count // mirror.block_size)
        table = np.arange(next_block, next_block + blocks, dtype=np.int32)
        next_block += blocks
        admitted.append(
            AdmittedRow(
                slot=slot,
                handle=slot,
                token_ids=(np.arange(count) % vocab_size).astype(np.int32),
                num_prompt=count,
                num_computed=0,
                blocks=np.tile(table, (mirror.num_groups, 1)),
                sampling=SamplingParams(),
                seed=0,
            )
        )
    nothing = np.zeros(0, np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(len(counts), dtype=np.int32),
        counts=np.asarray(counts, np.int32),
        num_decodes=0,
        sample_rows=nothing,
        layout=-1 - len(counts),
        released=nothing,
        appended=np.zeros((4, 0), np.int32),
        copies=np.zeros((5, 0), np.int32),
        admitted=admitted,
    )


def probe_rows(num: int) -> list[AdmittedRow]:
    """Sequences in the first `num` slots with top_p and min_p, and no top_k that narrows them."""
    sampling = SamplingParams(temperature=1.0, top_p=0.95, min_p=1e-6)
    return [
        AdmittedRow(
            slot=slot,
            handle=slot,
            token_ids=np.zeros(1, np.int32),
            num_prompt=1,
            num_computed=0,
            blocks=np.zeros((1, 1), np.int32),
            sampling=sampling,
            seed=slot,
        )
        for slot in range(num)
    ]
