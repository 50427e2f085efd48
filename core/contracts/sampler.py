"""Kind `sampler`: from logits to tokens and logprobs.

Runs in the worker. Legend: R sampling rows, V vocabulary.

The random draw is part of the contract, so that equal logits give equal tokens whatever the
sampler, the batch, the chunking or a preemption. The token is

    argmax over allowed t of  logits[t] / temperature + gumbel(seed, position, index, t)
    gumbel = -log(-log(u)),  u = (word + 0.5) / 2**32, computed in float64, rounded to float32
    word = philox4x32_10(counter=(t >> 2, position, index, 0), key=(seed & 0xffffffff, seed >> 32))[t & 3]

(Gumbel-max trick, Gumbel 1954; Philox 4x32-10, Salmon et al., SC'11.) `position` is the number of
tokens before the one being drawn, `index` the choice (0 when n is 1). Ties go to the lowest token
id. `octavo.core.random` has the function in NumPy with test vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of R rows as tensors on the device, at fixed addresses.

    temperature float32[R] (0 is greedy), top_k int32[R] (V is off), top_p float32[R],
    min_p float32[R], seed int64[R] (the 64 bits of the unsigned seed), position int64[R],
    index int64[R]. The flags are computed on the host and let a sampler skip work: all_greedy,
    any_top_k, any_top_p, any_min_p. max_logprobs: alternatives wanted by some row (-1: none wants
    logprobs, not even of the chosen token).
    """

    num_rows: int
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor
    index: torch.Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    max_logprobs: int


@dataclass(slots=True)
class SampledTokens:
    """token_ids int64[R]. valid bool[R]: False where no token was allowed (every logit of the row
    -inf or NaN): an error of that request alone."""

    token_ids: torch.Tensor
    valid: torch.Tensor


@dataclass(slots=True)
class TokenLogprobs:
    """token_ids int64[R, 1 + k], values float32[R, 1 + k], ranks int64[R]: the given token first,
    then the k most probable."""

    token_ids: torch.Tensor
    values: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True)
class SamplerContext:
    """vocab_size: V. max_num_seqs: most rows a step."""

    vocab_size: int
    max_num_seqs: int
    device: torch.device


class Sampler(ABC):
    """Order of operations: temperature, top_k, top_p (on what top_k left, renormalised), min_p,
    draw. Penalties, bias and masks are done by logits processors before."""

    @abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draw one token a row from float32[R, V]; may change `logits` in place."""

    @abstractmethod
    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
        """Log-softmax of raw float32[m, V] for the given int64[m] tokens and the `num` most
        probable ones; ties in rank go to the lower token id."""


class Spec:
    @hookspec
    def octavo_samplers(self) -> list[Provider[Sampler]]:  # type: ignore[empty-body]
        """Providers of samplers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `SamplerContext`.
        """
