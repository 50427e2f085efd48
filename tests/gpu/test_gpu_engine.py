"""Engines on a GPU: every attention backend, sampler and graph runner gives equal tokens."""

from __future__ import annotations

import pytest

SAMPLING = [
    {"temperature": 0.9, "top_k": 20},
    {"temperature": 1.1, "top_p": 0.85, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.05, "logit_bias": {7: 2.5, 30: -100.0}, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.0, "logprobs": 5},
]
EAGER = {"runner": "eager"}


@pytest.fixture(scope="module")
def generate(tiny, answer, requests_of):
    """Greedy and seeded tokens."""

    def generate(dtype, **parts):
        return answer(tiny(), requests_of(), dtype, **parts).tokens

    return generate


@pytest.fixture(scope="module")
def reference(generate):
    return generate("float32", attention="torch", sampler={"backend": "torch"}, graph=EAGER)


@pytest.mark.parametrize("attention", ["triton", "flex"])
@pytest.mark.parametrize("sampler", ["torch", "triton"])
def test_engine_in_float32(generate, reference, attention, sampler):
    assert generate("float32", attention=attention, sampler={"backend": sampler}) == reference


@pytest.mark.parametrize("attention", ["flashinfer", "triton", "mixed", "auto"])
def test_engine_in_bfloat16_repeats_itself(generate, attention):
    first = generate("bfloat16", attention=attention)
    assert all(len(tokens) == 10 for tokens in first)
    assert generate("bfloat16", attention=attention) == first


@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_engine_with_the_fused_decoder(generate, reference, attention):
    parts = {"sampler": {"backend": "triton"}, "graph": {"runner": "triton"}}
    assert generate("float32", attention=attention, **parts) == reference


@pytest.mark.parametrize("runner", ["compile", "cuda_graph"])
def test_engine_compiled_and_captured(generate, reference, runner):
    """Chunks and decodes of every batch size give what they give eagerly."""
    assert generate("float32", attention="triton", graph={"runner": runner}) == reference


@pytest.mark.parametrize("attention", ["flashinfer", "mixed"])
@pytest.mark.parametrize("runner", ["compile", "cuda_graph"])
def test_engine_compiled_and_captured_in_bfloat16(tiny, answer, requests_of, attention, runner):
    requests = requests_of(greedy=True)
    eager = answer(tiny(), requests, "bfloat16", attention=attention, graph=EAGER)
    found = answer(tiny(), requests, "bfloat16", attention=attention, graph={"runner": runner})
    found.check_like(eager, "bfloat16")


@pytest.mark.parametrize("sampler", ["torch", "triton", "flashinfer"])
@pytest.mark.parametrize("runner", ["triton", "cuda_graph"])
def test_sampling_after_every_graph_runner(tiny, answer, prompts, sampler, runner):
    """All that a request may ask of sampling, in batches of every size."""
    requests = [
        (prompts[number % len(prompts)], {**params, "max_tokens": 6 + number})
        for number, params in enumerate(SAMPLING)
    ]
    wanted = answer(tiny(), requests, attention="torch", sampler={"backend": "torch"}, graph=EAGER)
    found = answer(
        tiny(),
        requests,
        attention="triton",
        sampler={"backend": sampler},
        graph={"runner": runner},
    )
    assert found.tokens == wanted.tokens
    for mine, other in zip(found.outputs, wanted.outputs, strict=True):
        for one, two in zip(mine["top"], other["top"], strict=True):
            assert [token for token, _ in one] == [token for token, _ in two]
            assert [value for _, value in one] == pytest.approx([v for _, v in two], abs=1e-3)


def test_a_capture_of_some_sizes(generate, reference, make_engine, tiny, rehearsing):
    """Batches are padded to the next captured size; larger ones run compiled."""
    if rehearsing:
        pytest.skip("a CPU captures nothing")
    graph = {"runner": {"name": "cuda_graph", "capture_sizes": [1, 3]}}
    assert generate("float32", attention="triton", graph=graph) == reference
    engine = make_engine(tiny(), attention="triton", graph=graph)
    runner = {choice.kind: choice.name for choice in engine.report.plugins}["graph_runner"]
    engine.close()
    assert runner == "cuda_graph"


def test_swapped_sequences_go_on(generate, reference):
    found = generate(
        "float32",
        attention="triton",
        sampler={"backend": "triton"},
        kv_cache={"num_blocks": 9},
        preemption={"policy": "swap", "swap_space": 2**22},
    )
    assert found == reference
