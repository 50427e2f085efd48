"""Kind `logits_processor`: per-request edits of logits before sampling.

Two places. `device` processors run in the worker between forward pass and sampler, on tensors.
`host` processors run in the engine process and give masks, made while the forward pass runs
(grammars). State belongs to a slot, and follows committed tokens only: a prompt chunk that is
discarded, a preemption or a rejected speculation never shows.

Which run: every available provider with `rank` > 0, by descending rank (ties by name), then those
that the configuration lists under `logits_processors`, in its order (one that is listed and has a
positive rank takes the listed place and options). The built-in ones, in this order: bias,
allowed_tokens, penalties, bad_words, min_tokens; so masks win over bias.

An exception of a processor is an error of the requests it was called for, and of no others: a
`RequestError` is their callers' (HTTP 400), any other the processor's own (HTTP 500).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.contracts.kind import Kind
from octavo.core.contracts.provider import Provider, hookspec
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AttachedRequest:
    """A sequence that got a slot."""

    slot: int
    handle: int
    prompt: NDArray[np.int32]  # token ids the caller sent
    output: NDArray[np.int32]  # accepted before a preemption
    params: SamplingParams
    eos_token_ids: tuple[int, ...]  # empty with ignore_eos; stop token ids are in `params`


@dataclass(frozen=True, slots=True)
class Ending:
    """A sequence that a processor ends."""

    slot: int
    error: str | None = None  # why it failed; None: complete, with finish reason `stop`


@dataclass(frozen=True)
class LogitsProcessorContext:
    """What a factory gets."""

    vocab_size: int  # V
    max_num_seqs: int  # S
    max_model_len: int
    device: torch.device | None = None  # of the logits; None for host processors


class LogitsProcessor(ABC):
    """Base of both places."""

    @abstractmethod
    def attach(self, request: AttachedRequest) -> bool:
        """A sequence got a slot. False: this processor has nothing to do for it and is not called
        for its rows. Raise `RequestError` to fail that request alone. After False or an exception
        nothing may be kept: `detach` is not called."""

    def accept(
        self, slots: NDArray[np.intp], token_ids: NDArray[np.int32]
    ) -> Sequence[Ending] | None:
        """The tokens int32[n] were sampled and kept for the slots intp[n] (only attached ones,
        each once). Sequences that a host processor returns end here; a device processor returns
        None."""
        return None

    def rollback(self, slot: int, num_tokens: int) -> None:  # noqa: B027
        """Take back the last accepted tokens of a slot."""

    @abstractmethod
    def detach(self, slot: int) -> None:
        """An attached slot is free: finished, aborted, preempted or failed. Nothing may leak to its
        next user."""


class DeviceLogitsProcessor(LogitsProcessor):
    """Edits logits on the device. The forward pass may still be running: nothing here may wait for
    the device, neither for values nor for copies from pageable memory (see
    `octavo.testing.asynchronous_device`)."""

    def device_bytes(self) -> int:
        """Bytes of device memory that it may allocate later, such as tables built when first
        needed; a GPU's KV pool leaves them free. Called once."""
        return 0

    @abstractmethod
    def apply(self, logits: torch.Tensor, slots: NDArray[np.intp], rows: NDArray[np.intp]) -> None:
        """Edit float32[R, V] in place for the attached `slots` intp[n], which are the `rows`
        intp[n] of `logits`, ascending. Other rows must not change."""


class HostLogitsProcessor(LogitsProcessor):
    """Gives masks from the host."""

    @abstractmethod
    def mask(self, slots: NDArray[np.intp], bitmask: NDArray[np.int32]) -> Sequence[Ending] | None:
        """Clear the bits of forbidden tokens in int32[n, ceil(V / 32)], row i for slots[i]. Rows
        come with all bits set, or as an earlier processor left them. The forward pass of these rows
        may be running. Sequences returned end here; their sampled tokens are dropped."""


class Spec:
    @hookspec
    def octavo_logits_processors(self) -> list[Provider[LogitsProcessor]]:  # type: ignore[empty-body]
        """Providers of logits processors.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `LogitsProcessorContext`.
        """


KIND = Kind(
    "logits_processor", Spec, LogitsProcessor, LogitsProcessorContext, "logits_processors", "1.1"
)
