"""The order of tokens by value, as the sampler contract has it, and logprobs made with it.

Legend: r, m rows, V vocabulary. A row's result does not depend on the other rows.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.core.contracts.sampler import TokenLogprobs

_LOW = 0xFFFFFFFF
_ELEMENTS = 2**24
"""Logits whose log-softmax is made at once."""


def top_tokens(values: torch.Tensor, num: int) -> torch.Tensor:
    """int64[r, num]: the tokens with the largest values float32[r, V], in descending order, ties to
    the lower id. Rows with NaN give some token ids."""
    keys = order_keys(values)
    # NumPy's vectorised partition and sort are several times as fast as torch's on a CPU.
    top = _largest_numpy(keys, num) if keys.device.type == "cpu" else largest(keys, num)
    return (top & _LOW) ^ _LOW


def largest(keys: torch.Tensor, num: int) -> torch.Tensor:
    """int64[r, num]: the largest of int64[r, V], in descending order."""
    return keys.topk(num, dim=1).values


def _largest_numpy(keys: torch.Tensor, num: int) -> torch.Tensor:
    array, size = keys.numpy(), keys.shape[1]
    if num < size:
        array = np.partition(array, size - num, axis=1)[:, size - num :]
    return torch.from_numpy(np.sort(array, axis=1)[:, ::-1].copy())


def order_keys(values: torch.Tensor) -> torch.Tensor:
    """int64[r, V] that order as (value, lower id first); all differ. The upper half is the float's
    bits, turned so that they order as integers; adding 0 makes -0 and 0 one."""
    bits = (values + 0.0).view(torch.int32)
    upper = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    low = torch.arange(values.shape[1], device=values.device) ^ _LOW
    return upper | low


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
    """`Sampler.logprobs`, some rows at a time."""
    step = max(1, _ELEMENTS // logits.shape[1])
    parts = [
        _logprobs(logits[start : start + step], token_ids[start : start + step], num)
        for start in range(0, max(1, len(logits)), step)
    ]
    if len(parts) == 1:
        return parts[0]
    return TokenLogprobs(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.values for part in parts]),
        torch.cat([part.ranks for part in parts]),
    )


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
    column = token_ids.unsqueeze(1)
    chosen = logits.gather(1, column)
    order = torch.arange(logits.shape[1], device=logits.device)
    before = (logits > chosen) | ((logits == chosen) & (order < column))
    values = torch.log_softmax(logits, dim=1)
    ids = torch.cat([column, top_tokens(logits, num)], dim=1) if num else column
    return TokenLogprobs(ids, values.gather(1, ids), before.sum(dim=1) + 1)
