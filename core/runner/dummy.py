"""Batches of padding: rows that read and write the null block, for warm-up and capture."""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.contracts.attention_backend import AttentionBatch


def dummy_batch(
    num_rows: int, tokens_each: int, *, max_blocks: int, device: torch.device
) -> tuple[torch.Tensor, AttentionBatch]:
    """(token ids int64[T], the batch) of `num_rows` rows with `tokens_each` tokens and nothing
    before them. Every place in the pool is in block 0. max_blocks: width of the block table."""
    total = num_rows * tokens_each
    starts = np.arange(0, total + 1, tokens_each, dtype=np.int32)
    seq_lens = np.full(num_rows, tokens_each, np.int32)
    table = np.zeros((num_rows, max_blocks), np.int32)
    positions = torch.arange(tokens_each, device=device).repeat(num_rows)
    batch = AttentionBatch(
        num_tokens=total,
        num_rows=num_rows,
        num_decodes=num_rows if tokens_each == 1 else 0,
        max_query_len=tokens_each,
        max_seq_len=tokens_each,
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=torch.from_numpy(table).to(device),
        slot_mapping=torch.zeros(total, dtype=torch.int64, device=device),
        positions=positions,
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
        block_table_cpu=table,
    )
    return torch.zeros(total, dtype=torch.int64, device=device), batch
