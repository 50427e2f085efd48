"""Sampler `cpu`: the native kernels, a row on each thread.

Legend: R sampling rows, V vocabulary.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.backends.cpu import native
from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SampledTokens, Sampler, SamplerContext, SamplingBatch


class CpuSampler(Sampler):
    """The tokens of the sampler contract, without sorting and with noise only where it can win."""

    def __init__(self, options: NoOptions, context: SamplerContext) -> None:
        self._library = native.kernels()

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        rows, vocab_size = logits.shape
        logits = logits.contiguous()
        token_ids = torch.empty(rows, dtype=torch.int64)
        valid = torch.empty(rows, dtype=torch.bool)
        columns = None if batch.all_greedy else _columns(batch)
        self._library.octavo_sample(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab_size,
            None if columns is None else ctypes.addressof(columns),
            token_ids.data_ptr(),
            valid.data_ptr(),
            torch.get_num_threads(),
        )
        return SampledTokens(token_ids, valid)


def _columns(batch: SamplingBatch) -> native.SamplingStruct:
    struct = native.SamplingStruct()
    for name in native.SAMPLING_COLUMNS:
        column = getattr(batch, name)
        assert column.is_contiguous(), f"{name} is a column of its own"
        setattr(struct, name, column.data_ptr())
    return struct
