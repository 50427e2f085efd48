"""Bytes of the tables that the built-in processors keep on a device when every slot has a row.

Legend: S slots, L longest sequence, V vocabulary.
"""

from __future__ import annotations


def penalties_bytes(max_num_seqs: int, max_model_len: int, vocab_size: int) -> int:
    """int64[S, L] known tokens and int32[S, V] counts."""
    return max_num_seqs * (8 * max_model_len + 4 * vocab_size)


def allowed_tokens_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """bool[S, V]."""
    return max_num_seqs * vocab_size


def tables_bytes(max_num_seqs: int, max_model_len: int, vocab_size: int) -> int:
    """Of all that run unless the configuration says otherwise."""
    return penalties_bytes(max_num_seqs, max_model_len, vocab_size) + allowed_tokens_bytes(
        max_num_seqs, vocab_size
    )
