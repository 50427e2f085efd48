"""Sampler `flashinfer`: thresholds from the library, tokens of the contract."""

from __future__ import annotations

import pytest
import torch

from octavo.core.contracts import NoOptions
from octavo.core.contracts.sampler import SamplerContext
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.samplers.torch_sampler import TorchSampler
from octavo.testing.conformance.sampler import make_batch

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy, of inf lanes

CPU = torch.device("cpu")
VOCABULARY = 400
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.5},
    {"temperature": 0.5, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 300, "top_p": 0.99, "min_p": 0.01},
]


def batch(params, seed, vocab_size=VOCABULARY):
    draws = [
        (SamplingParams(**values), seed * 100 + slot, slot + seed, slot % 3)
        for slot, values in enumerate(params)
    ]
    return make_batch(vocab_size, draws)


def samplers(kind="flashinfer", vocab_size=VOCABULARY):
    context = SamplerContext(vocab_size, len(PARAMS), CPU)
    if kind == "triton":
        from octavo.backends.triton.sampler import TritonSampler as Other
    else:
        from octavo.backends.flashinfer.sampler import FlashInferSampler as Other
    return Other(NoOptions(), context), TorchSampler(NoOptions(), context)


def logits_of(kind, seed, rows, vocab_size=VOCABULARY):
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    if kind == "ties":  # as logits that were bfloat16
        logits = logits.bfloat16().float()
    elif kind == "coarse":
        logits = logits.round()
    elif kind == "masked":
        logits[:, 60:] = -torch.inf
    elif kind == "flat":
        logits *= 1e-3
    return logits


def check(mine, reference, logits, params, seed):
    got = mine.sample(logits.clone(), batch(params, seed, logits.shape[1]))
    wanted = reference.sample(logits.clone(), batch(params, seed, logits.shape[1]))
    assert torch.equal(got.valid, wanted.valid)
    assert torch.equal(got.token_ids[got.valid], wanted.token_ids[got.valid])


@pytest.mark.parametrize("kind", ["plain", "ties", "coarse", "masked", "flat"])
def test_tokens_equal_those_of_the_reference(library, kind):
    mine, reference = samplers()
    for seed in range(2 if kind == "ties" else 1):
        check(mine, reference, logits_of(kind, seed, len(PARAMS)), PARAMS, seed)
    assert library.named("top_k_mask_logits")
    assert library.named("top_p_renorm_probs")


@pytest.mark.parametrize(
    ("error", "kind"), [(-1, "plain"), (2, "ties"), (-200, "ties"), (200, "plain")]
)
def test_a_threshold_that_rounding_moved_does_not_change_a_token(library, error, kind):
    library.error = error
    mine, reference = samplers()
    params = [values for values in PARAMS if "top_p" in values]
    check(mine, reference, logits_of(kind, 3, len(params)), params, 3)


def test_rows_that_the_search_cannot_settle_go_to_the_kernel(library, monkeypatch):
    from octavo.backends.flashinfer import filters

    gone, whole = [], filters.cut_to_nucleus
    monkeypatch.setattr(
        filters, "cut_to_nucleus", lambda *args: gone.append(int(args[-1].sum())) or whole(*args)
    )
    mine, _ = samplers()
    logits = logits_of("plain", 1, len(PARAMS))
    params = [PARAMS[3], PARAMS[7]]
    mine.sample(logits[:2].clone(), batch(params, 1))
    assert gone == [0]
    library.error = 200
    mine.sample(logits[:2].clone(), batch(params, 1))
    assert gone[1] in (1, 2)


def test_invalid_rows_are_told_and_trouble_nobody(library):
    mine, reference = samplers()
    logits = logits_of("plain", 2, len(PARAMS))
    logits[2] = -torch.inf
    logits[3, 7] = torch.nan
    logits[4, 9] = torch.inf
    check(mine, reference, logits, PARAMS, 2)


def test_greedy_batches_ask_the_library_nothing(library):
    mine, reference = samplers()
    params = [{"temperature": 0.0}] * 4
    check(mine, reference, logits_of("coarse", 0, 4), params, 0)
    assert library.calls == []


@pytest.mark.parametrize("kind", ["plain", "coarse", "masked"])
def test_sampler_triton_gives_the_same_tokens(kind):
    mine, reference = samplers("triton")
    check(mine, reference, logits_of(kind, 5, len(PARAMS)), PARAMS, 5)
    check(mine, reference, logits_of(kind, 9, 3), [{"temperature": 0.0}] * 3, 9)


@pytest.mark.parametrize("kind", ["flashinfer", "triton"])
@pytest.mark.parametrize("values", ["flat", "ties"])
def test_a_nucleus_wider_than_the_candidates(library, kind, values):
    """Of 2500 tokens of nearly equal weight, or of few different ones."""
    size = 2500
    mine, reference = samplers(kind, size)
    params = [
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_p": 0.95, "min_p": 0.99},
        {"temperature": 0.0},
        {"temperature": 1.7, "top_p": 0.999},
        {"top_k": 3},
    ]
    logits = logits_of(values, 4, len(params), size) * (1 if values == "flat" else 0.2)
    check(mine, reference, logits, params, 4)
