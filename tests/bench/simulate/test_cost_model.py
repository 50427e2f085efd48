"""The cost model: shapes of steps, sizes of models, profiles, and the fit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from octavo.core.errors import ConfigError
from octavo.core.messages import AdmittedRow, StepPlan
from octavo.core.sampling_params import SamplingParams
from octavo.plugins.executors import accelerators
from octavo.plugins.executors.cost_model import (
    RooflineModel,
    StepShape,
    StepTracker,
    fit,
    nonnegative_least_squares,
    step_records,
)
from octavo.plugins.executors.model_size import model_size

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MIXTRAL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}


def plan(
    counts: list[int], decodes: int, admitted: dict[int, int] | None = None, copies: Any = None
) -> StepPlan:
    """Slots 0 .. B - 1; `admitted`: slot to tokens that are computed."""
    rows = [
        AdmittedRow(
            slot=slot,
            handle=slot,
            token_ids=np.zeros(1, np.int32),
            num_prompt=1,
            num_computed=computed,
            blocks=np.zeros((1, 0), np.int32),
            sampling=SamplingParams(),
            seed=0,
        )
        for slot, computed in (admitted or {}).items()
    ]
    empty = np.empty((5, 0), np.int32)
    return StepPlan(
        step=0,
        slots=np.arange(len(counts), dtype=np.int32),
        counts=np.asarray(counts, np.int32),
        num_decodes=decodes,
        sample_rows=np.arange(decodes, dtype=np.int32),
        layout=len(counts),
        released=np.empty(0, np.int32),
        appended=np.empty((4, 0), np.int32),
        copies=empty if copies is None else np.asarray(copies, np.int32).T,
        admitted=rows,
    )


@pytest.mark.parametrize("window", [None, 1, 5, 7, 100])
def test_a_tracker_counts_what_attention_does(window: int | None) -> None:
    tracker = StepTracker(4, window)
    computed = [6, 0, 3]
    for counts, decodes, admitted in (
        ([1, 4, 9], 1, {0: 6, 1: 0, 2: 3}),
        ([1, 1, 2], 2, None),
        ([1, 1, 1], 3, None),
    ):
        shape = tracker.follow(plan(counts, decodes, admitted))
        spans = [range(c, c + n) for c, n in zip(computed, counts, strict=True)]
        assert shape.prefill == sum(counts[decodes:])
        assert (shape.decodes, shape.sampled) == (decodes, decodes)
        assert shape.context == sum(span.stop for span in spans)
        assert shape.pairs == sum(p + 1 for span in spans[decodes:] for p in span)
        if window is not None:
            seen = [[min(p + 1, window) for p in span] for span in spans]
            assert shape.window_pairs == sum(map(sum, seen[decodes:]))
            reach = [span.stop - max(0, span.start + 1 - window) for span in spans]
            assert shape.window_context == sum(reach)
        computed = [span.stop for span in spans]


def test_copies_are_counted_once_a_token_whatever_the_groups() -> None:
    copies = [
        (0, 0, 1, 2, 5),
        (0, 1, 1, 2, 5),
        (1, 0, 3, 4, 16),
        (2, 0, 4, 3, 16),
        (1, 1, 3, 4, 16),
    ]
    shape = StepTracker(4).follow(plan([1], 1, {0: 3}, copies))
    assert (shape.copied, shape.swapped) == (5, 32)


@pytest.mark.parametrize(
    ("config", "billions"), [(LLAMA_8B, 8.030), (MIXTRAL, 46.702), (GPT2, 0.1235)]
)
def test_parameters_are_those_of_the_published_models(config: Any, billions: float) -> None:
    size = model_size(config, "bfloat16", "bfloat16")
    assert size.num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_bytes_of_weights_and_kv() -> None:
    size = model_size(LLAMA_8B, "bfloat16", "bfloat16")
    assert size.kv_bytes_per_token == 131072
    assert size.weight_bytes == 2 * size.num_parameters
    eight = model_size(LLAMA_8B, "bfloat16", "fp8", "fp8")
    assert eight.kv_bytes_per_token == 65536
    assert eight.weight_bytes == size.layer_params + 4 * size.head_params
    four = LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert model_size(four, "bfloat16", "bfloat16").weight_bits == 4


def test_few_tokens_read_few_experts() -> None:
    size = model_size(MIXTRAL, "bfloat16", "bfloat16")
    shared = size.num_layers * (size.attention_params + size.mlp_params)
    one = shared + size.num_layers * 2 * size.expert_params
    assert size.read_bytes(1) == pytest.approx(2 * one, rel=1e-6)
    assert size.read_bytes(1000) == pytest.approx(2 * size.layer_params, rel=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**LLAMA_8B, "hidden_size": None}, "lacks hidden_size or n_embd"),
        ({**LLAMA_8B, "kv_lora_rank": 512}, "latent attention"),
        ({**MIXTRAL, "num_experts_per_tok": 0}, "lacks num_experts_per_tok"),
    ],
)
def test_a_config_that_does_not_tell_enough(config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        model_size(config, "bfloat16", "bfloat16")


@pytest.mark.parametrize("name", accelerators.names())
def test_every_profile_is_valid_and_plausible(name: str) -> None:
    profile = accelerators.load(name)
    assert profile.summary
    assert 1e9 < profile.memory_bytes < 1e12
    assert profile.host_bandwidth <= profile.memory_bandwidth < 1e14
    assert profile.flops_of("float16") >= profile.flops_of("float32") >= 1e10
    cost = RooflineModel(profile, model_size(LLAMA_8B, "float16", "float16"), "float16")
    assert cost.seconds(StepShape(512, 0, 1, 512, 512 * 256)) > 0


def test_profiles_can_be_changed_and_mistakes_are_named() -> None:
    assert {"h100", "h200", "a100-80gb", "l40s"} <= set(accelerators.names())
    changed = accelerators.load({"base": "h100", "memory_bytes": 1000})
    assert changed.memory_bytes == 1000
    assert changed.flops == accelerators.load("h100").flops
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        accelerators.load("h10")
    with pytest.raises(ConfigError, match="memory_byte: Extra inputs"):
        accelerators.load({"base": "h100", "memory_byte": 5})
    with pytest.raises(ConfigError, match=r"cannot read 'nowhere\.yaml'"):
        accelerators.load("nowhere.yaml")


def test_a_type_that_the_device_lacks_computes_in_a_wider_one() -> None:
    assert accelerators.load("a100-80gb").flops_of("fp8") == 312e12
    assert accelerators.load("t4").flops_of("bfloat16") == 65e12
    only_half = accelerators.load({"base": "t4", "flops": {"float16": 65e12}})
    with pytest.raises(ConfigError, match="float32"):
        only_half.flops_of("float32")


H100: dict[str, Any] = {
    "base": "h100",
    "compute_efficiency": 1.0,
    "attention_efficiency": 1.0,
    "bandwidth_efficiency": 1.0,
    "step_overhead": 0.0,
}


def cost_of(config: Any = LLAMA_8B, **changes: Any) -> RooflineModel:
    model = model_size(config, "bfloat16", "bfloat16")
    return RooflineModel(accelerators.load(H100 | changes), model, "bfloat16")


def test_decoding_is_bound_by_memory() -> None:
    size = model_size(LLAMA_8B, "bfloat16", "bfloat16")
    read = size.weight_bytes - 2 * size.head_params + 131072 * 10_000
    found = cost_of().seconds(StepShape(0, 10, 10, 10_000, 0))
    assert found == pytest.approx(read / 3.35e12, rel=1e-9)


def test_prefill_is_bound_by_arithmetic() -> None:
    size = model_size(LLAMA_8B, "bfloat16", "bfloat16")
    pairs = 8192 * 8193 // 2
    flops = 2 * size.layer_params * 8192 + 4 * 32 * 4096 * pairs
    head = 2 * size.head_params / 3.35e12
    found = cost_of().seconds(StepShape(8192, 0, 1, 8192, pairs))
    assert found == pytest.approx(flops / 989.4e12 + head, rel=1e-9)


def test_overhead_and_copies_add_up() -> None:
    base = StepShape(0, 1, 1, 100, 0)
    copies = StepShape(0, 1, 1, 100, 0, copied=1000, swapped=500)
    extra = cost_of().seconds(copies) - cost_of().seconds(base)
    assert extra == pytest.approx(2 * 131072 * 1000 / 3.35e12 + 131072 * 500 / 64e9, rel=1e-6)
    slower = cost_of(step_overhead=0.25).seconds(base)
    assert slower == pytest.approx(cost_of().seconds(base) + 0.25)


def test_layers_with_a_window_read_less() -> None:
    config = LLAMA_8B | {
        "sliding_window": 512,
        "layer_types": ["sliding_attention", "full_attention"] * 16,
    }
    shape = StepShape(0, 1, 1, 100_000, 0, window_context=512)
    nothing = StepShape(0, 1, 1, 0, 0)
    cost = cost_of(config)
    read = cost.seconds(shape) - cost.seconds(nothing)
    assert read == pytest.approx(131072 / 2 * (100_000 + 512) / 3.35e12, rel=1e-6)


def random_shapes(count: int, seed: int) -> list[StepShape]:
    draw = np.random.default_rng(seed)
    shapes = []
    for _ in range(count):
        prefill = int(draw.integers(0, 2) * draw.integers(1, 400))
        decodes = int(draw.integers(0, 30))
        context = int(draw.integers(1, 5000))
        shapes.append(StepShape(prefill, decodes, decodes + 1, context, prefill * 90))
    return shapes


def test_a_fit_finds_the_weights_that_made_the_times() -> None:
    shapes = random_shapes(200, seed=1)
    true = (0.02, 2.7e-3, 3.4e-3, 1e-4, 2e-7, 0.0)
    seconds = [
        true[0]
        + true[1] * s.prefill
        + true[2] * s.decodes
        + true[3] * s.sampled
        + true[4] * s.context
        + true[5] * s.pairs
        for s in shapes
    ]
    found = fit(step_records(shapes, seconds))
    for shape, value in zip(random_shapes(50, seed=2), range(50), strict=True):
        expected = (
            true[0]
            + true[1] * shape.prefill
            + true[2] * shape.decodes
            + true[3] * shape.sampled
            + true[4] * shape.context
        )
        assert found.seconds(shape) == pytest.approx(expected, rel=0.01), value
    assert found.error < 1e-6
    assert min(found.weights) >= 0


def test_a_fit_of_noisy_steps_keeps_the_total() -> None:
    shapes = random_shapes(100, seed=5)
    noise = np.random.default_rng(0).lognormal(0, 0.4, 100)
    seconds = [float(n) * (0.01 + 1e-3 * s.tokens) for n, s in zip(noise, shapes, strict=True)]
    found = fit(step_records(shapes, seconds))
    assert sum(map(found.seconds, shapes)) == pytest.approx(sum(seconds))


def test_records_that_cannot_be_fitted() -> None:
    with pytest.raises(ValueError, match="lack seconds, prefill"):
        fit({"tokens": [1.0]})
    with pytest.raises(ValueError, match="at least 6 steps"):
        fit(step_records(random_shapes(3, 0), [1.0, 1.0, 1.0]))


@pytest.mark.parametrize("seed", range(20))
def test_nonnegative_least_squares_is_the_best_of_all_subsets(seed: int) -> None:
    draw = np.random.default_rng(seed)
    matrix, target = draw.normal(size=(12, 4)), draw.normal(size=12)
    found = nonnegative_least_squares(matrix, target)
    assert (found >= 0).all()
    best = float(np.linalg.norm(target))
    for size in (1, 2, 3, 4):
        for subset in itertools.combinations(range(4), size):
            part = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(np.linalg.norm(matrix[:, subset] @ part - target)))
    assert float(np.linalg.norm(matrix @ found - target)) == pytest.approx(best, rel=1e-9)
