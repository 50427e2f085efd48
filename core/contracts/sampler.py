"""Kind `sampler`: from logits to tokens and logprobs.

Runs in the worker. Legend: R sampling rows, V vocabulary.

Everything that decides which token is drawn is part of the contract, so that equal logits give
equal tokens whatever the sampler, the batch, the chunking or a preemption. For a row, float32
unless said otherwise:

    scaled[t] = logits[t] / temperature, at most the largest finite float32
    top_k:  the k tokens with the largest scaled
    top_p:  of these, in descending order, the shortest run whose weights add up to at least
            ceil(top_p * total), where weight[t] = round(2**40 * exp(scaled[t] - max)), computed in
            float64, rounded half to even to int64, and total is the sum over what top_k left;
            sums of integers do not depend on the order of summation
    min_p:  of these, the tokens with scaled[t] >= max + log(min_p), computed in float64
    token = argmax over the tokens left of  scaled[t] + gumbel(seed, position, index, t)
    gumbel = -log(-log(u)),  u = (word + 0.5) / 2**32, computed in float64, rounded to float32
    word = philox4x32_10(counter=(t >> 2, position, index, 0), key=(seed % 2**32, seed >> 32)),
           of its four words number t & 3

All ties (in top_k, in the order of top_p, in argmax, in ranks) go to the lower token id. u is exact
in float64 and never 0 or 1, so -3.14 < gumbel < 22.88.
(Gumbel-max trick, Gumbel 1954; Philox 4x32-10, Salmon et al., SC'11.) `position` is the number of
tokens before the one being drawn, modulo 2**32; `index` is the choice (0 when n is 1).
`octavo.kernels.random` has the draw in NumPy with test vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.contracts.provider import Provider, hookspec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray


@dataclass(slots=True)
class SamplingColumns:
    """The same parameters on the host, read-only, each [R]: a sampler chooses its code path from
    them without waiting for the device."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]


@dataclass(slots=True)
class SamplingBatch:
    """Parameters of R rows, as tensors on the device at fixed addresses. The flags are computed on
    the host and let a sampler skip work."""

    num_rows: int  # R
    temperature: torch.Tensor  # float32[R], 0: greedy
    top_k: torch.Tensor  # int32[R], V: off
    top_p: torch.Tensor  # float32[R], 1: off
    min_p: torch.Tensor  # float32[R], 0: off
    seed: torch.Tensor  # int64[R], the 64 bits of the unsigned seed
    position: torch.Tensor  # int64[R]
    index: torch.Tensor  # int64[R]
    all_greedy: bool  # the other parameters are then not written and must not be read
    any_top_k: bool  # of rows that are not greedy, as the next two
    any_top_p: bool
    any_min_p: bool
    max_logprobs: int  # most alternatives of a row; -1: no row wants logprobs
    host: SamplingColumns


@dataclass(slots=True)
class SampledTokens:
    """Later calls of the sampler write neither tensor: the next step reads them on the device."""

    token_ids: torch.Tensor  # int64[R]
    # bool[R]. False where no token was allowed (every logit is -inf) or some logit is NaN: an error
    # of that request alone, whose token is then any valid id.
    valid: torch.Tensor


@dataclass(slots=True)
class TokenLogprobs:
    """The given token first, then the k most probable."""

    token_ids: torch.Tensor  # int64[R, 1 + k]
    values: torch.Tensor  # float32[R, 1 + k]
    ranks: torch.Tensor  # int64[R]


@dataclass(frozen=True)
class SamplerContext:
    """What a factory gets."""

    vocab_size: int  # V
    max_num_seqs: int  # maximum number of rows
    device: torch.device


class Sampler(ABC):
    """The operations of the module's docstring, in that order. Greedy rows take the argmax of their
    logits. Penalties, bias and masks were applied by logits processors. A row's result must not
    depend on the other rows."""

    # Whether `sample` of a batch without top_k, top_p and min_p that is not `all_greedy` can be
    # captured in a CUDA graph: the same launches for the same number of rows, reading only the
    # logits and the batch's tensors.
    captures: bool = False

    @abstractmethod
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> SampledTokens:
        """Draw one token a row from float32[R, V]; may change `logits` in place."""

    def logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, num: int) -> TokenLogprobs:
        """Log-softmax of raw float32[m, V] for the given int64[m] tokens and the `num` (0 to V)
        most probable ones. A rank is 1 plus the number of tokens before it in descending order."""
        from octavo.kernels.token_order import token_logprobs

        return token_logprobs(logits, token_ids, num)


class Spec:
    @hookspec
    def octavo_samplers(self) -> list[Provider[Sampler]]:  # type: ignore[empty-body]
        """Providers of samplers.

        When: once, when the registry is made. Where: any process. Result: all are collected.
        Context class: `SamplerContext`.
        """
