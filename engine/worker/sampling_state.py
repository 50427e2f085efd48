"""Sampling parameters of every slot as arrays, gathered into one `SamplingBatch` a step.

Legend: S slots, R sampling rows, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.contracts.sampler import SamplingBatch, SamplingColumns
from octavo.core.messages import AdmittedRow
from octavo.engine.worker.processors import ProcessorSet
from octavo.engine.worker.transfer import Fence

__all__ = ["NO_LOGPROBS", "ProcessorSet", "SamplingState"]

NO_LOGPROBS = -1
"""In `num_logprobs`: not even the logprob of the chosen token is wanted."""

TINY = float(np.finfo(np.float32).tiny)
"""Least number that float32 holds in full."""

_STAGING_BUFFERS = 2


class _Staged:
    """A device array at a fixed address, written through host memory.

    On a CPU host and device memory are the same. Elsewhere two pinned buffers take turns, so that
    the host may prepare a step while the copy of the last one has not run yet.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(shape, dtype=dtype, device=device)
        self._turn = 0
        if device.type == "cpu":
            self._buffers = [self.device]
        else:
            self._buffers = [
                torch.zeros(shape, dtype=dtype, pin_memory=True) for _ in range(_STAGING_BUFFERS)
            ]
        self._fences = [Fence(device) for _ in self._buffers]
        self._arrays: list[NDArray[Any]] = [buffer.numpy() for buffer in self._buffers]

    def writable(self) -> NDArray[Any]:
        """The host array to write before `upload`; what it holds is undefined."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._fences[self._turn].wait()
        return self._arrays[self._turn]

    def upload(self) -> None:
        """Copy the array last got from `writable` to the device, in stream order."""
        if self._buffers[self._turn] is not self.device:
            self.device.copy_(self._buffers[self._turn], non_blocking=True)
            self._fences[self._turn].set()


class SamplingState:
    """Per-slot sampling parameters. Lives in the worker; not thread-safe."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device | str) -> None:
        device = torch.device(device)
        self.vocab_size = vocab_size
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.full(max_num_seqs, vocab_size, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seed = np.zeros(max_num_seqs, np.int64)
        self._index = np.zeros(max_num_seqs, np.int64)
        self._logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self._prompt_logprobs = np.full(max_num_seqs, NO_LOGPROBS, np.int32)
        self._restricted = np.zeros(max_num_seqs, np.bool_)
        self._num_logprobs = 0
        self._num_prompt_logprobs = 0
        self._floats = _Staged((3, max_num_seqs), torch.float32, device)
        self._ints = _Staged((4, max_num_seqs), torch.int64, device)
        self._top_k_device = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._greedy = False  # the device's temperatures are all 0

    def restricted(self, slot: int) -> bool:
        """Whether a slot's parameters forbid tokens, perhaps all of them."""
        return bool(self._restricted[slot])

    def attach(self, row: AdmittedRow) -> None:
        """A sequence got a slot. Temperatures below `GREEDY_EPSILON` become 0, top_k 0 and counts
        of at least V become V (off). A top_p that float32 would round to 0 still keeps one
        token."""
        self.release(row.slot)
        slot, params = row.slot, row.sampling
        self._restricted[slot] = bool(
            params.allowed_token_ids or params.bad_words_token_ids or params.structured_outputs
        )
        self._temperature[slot] = 0.0 if params.greedy else params.temperature
        self._top_k[slot] = min(params.top_k or self.vocab_size, self.vocab_size)
        self._top_p[slot] = max(params.top_p, TINY)
        self._min_p[slot] = params.min_p
        self._seed[slot] = np.uint64(row.seed % 2**64).astype(np.int64)
        self._index[slot] = row.index
        self._logprobs[slot] = self._wanted(params.logprobs)
        self._prompt_logprobs[slot] = self._wanted(params.prompt_logprobs)
        self._count(slot, 1)

    def _count(self, slot: int, sign: int) -> None:
        self._num_logprobs += sign * int(self._logprobs[slot] != NO_LOGPROBS)
        self._num_prompt_logprobs += sign * int(self._prompt_logprobs[slot] != NO_LOGPROBS)

    def _wanted(self, count: int | None) -> int:
        if count is None:
            return NO_LOGPROBS
        return self.vocab_size if count < 0 else min(count, self.vocab_size)

    def release(self, slot: int) -> None:
        """The slot is free. Releasing a free slot does nothing."""
        self._count(slot, -1)
        self._temperature[slot] = 0.0
        self._logprobs[slot] = NO_LOGPROBS
        self._prompt_logprobs[slot] = NO_LOGPROBS

    def num_logprobs(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """int32[R]: alternatives that each slot wants beside the sampled token; 0 for the sampled
        one alone, `NO_LOGPROBS` (-1) for none at all, V for the whole vocabulary (a caller's -1).
        """
        return self._logprobs[slots]

    @property
    def any_prompt_logprobs(self) -> bool:
        """Whether some slot wants logprobs of its prompt."""
        return bool(self._num_prompt_logprobs)

    def num_prompt_logprobs(self, slots: NDArray[np.intp]) -> NDArray[np.int32]:
        """int32[R], as `num_logprobs`, for the prompt's tokens."""
        return self._prompt_logprobs[slots]

    def batch(self, slots: NDArray[np.intp], positions: NDArray[np.int64]) -> SamplingBatch:
        """Parameters of the sampling rows `slots` intp[R], of which row i draws the token at
        `positions[i]` (the number of tokens before it). The tensors are overwritten by the next
        call; on CUDA in stream order."""
        num = len(slots)
        temperature = self._temperature[slots]
        columns = SamplingColumns(
            temperature, self._top_k[slots], self._top_p[slots], self._min_p[slots]
        )
        random = temperature > 0
        all_greedy = not random.any()
        if not all_greedy:
            self._write(slots, positions, columns)
        return self._at_fixed_addresses(
            columns,
            all_greedy=all_greedy,
            any_top_k=not all_greedy and bool((random & (columns.top_k < self.vocab_size)).any()),
            any_top_p=not all_greedy and bool((random & (columns.top_p < 1)).any()),
            any_min_p=not all_greedy and bool((random & (columns.min_p > 0)).any()),
            max_logprobs=int(self._logprobs[slots].max()) if self._num_logprobs and num else -1,
        )

    def _at_fixed_addresses(self, host: SamplingColumns, **flags: Any) -> SamplingBatch:
        """A batch with these columns; its tensors lie where those of all batches do."""
        num = len(host.temperature)
        floats, ints = self._floats.device, self._ints.device
        return SamplingBatch(
            num_rows=num,
            temperature=floats[0, :num],
            top_p=floats[1, :num],
            min_p=floats[2, :num],
            seed=ints[0, :num],
            position=ints[1, :num],
            index=ints[2, :num],
            top_k=self._top_k_device[:num],
            host=host,
            **flags,
        )

    def unfiltered(self, num: int) -> SamplingBatch:
        """A batch of `num` rows without filters at the addresses that all batches have. What its
        tensors hold is up to `fill`."""
        ones, zeros = np.ones(num, np.float32), np.zeros(num, np.float32)
        return self._at_fixed_addresses(
            SamplingColumns(ones, np.full(num, self.vocab_size, np.int32), ones, zeros),
            all_greedy=False,
            any_top_k=False,
            any_top_p=False,
            any_min_p=False,
            max_logprobs=NO_LOGPROBS,
        )

    def fill(self, batch: SamplingBatch) -> None:
        """Let the tensors say what a batch without filters asks for, where it was not written."""
        if batch.all_greedy and not self._greedy:
            self._floats.device[0].zero_()
            self._greedy = True

    def _write(
        self, slots: NDArray[np.intp], positions: NDArray[np.int64], columns: SamplingColumns
    ) -> None:
        num = len(slots)
        self._greedy = False
        floats = self._floats.writable()
        floats[0, :num] = columns.temperature
        floats[1, :num] = columns.top_p
        floats[2, :num] = columns.min_p
        self._floats.upload()
        ints = self._ints.writable()
        ints[0, :num] = self._seed[slots]
        ints[1, :num] = positions
        ints[2, :num] = self._index[slots]
        ints[3, :num] = columns.top_k
        self._ints.upload()
        self._top_k_device.copy_(self._ints.device[3])
