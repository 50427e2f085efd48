"""Requests for benchmarks: random token prompts, the same for everybody who gives the same seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octavo.core.messages import EngineRequest, Int32
from octavo.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class Shape:
    """num_prompts requests of input_len prompt tokens that generate output_len tokens each."""

    num_prompts: int
    input_len: int
    output_len: int


def random_prompts(shape: Shape, vocab_size: int, seed: int) -> Int32:
    """Uniform token ids, int32[num_prompts, input_len].

    `RandomState` and not `Generator`: NumPy guarantees that its stream never changes.
    """
    draw = np.random.RandomState(seed)
    return draw.randint(0, vocab_size, (shape.num_prompts, shape.input_len), dtype=np.int32)


def requests(prompts: Int32, output_len: int, first_handle: int = 0) -> Iterator[EngineRequest]:
    """Greedy requests that generate exactly `output_len` tokens, handles ascending."""
    sampling = SamplingParams(
        temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
    )
    for number, token_ids in enumerate(prompts):
        handle = first_handle + number
        yield EngineRequest(
            handle=handle,
            request_id=f"bench-{handle}",
            token_ids=token_ids,
            sampling=sampling,
            seed=handle,
            max_tokens=output_len,
        )
