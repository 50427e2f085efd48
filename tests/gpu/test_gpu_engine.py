"""Engines on a GPU: every attention backend and sampler gives the reference's tokens."""

from __future__ import annotations

import pytest
import torch

PROMPTS = [[5, 9, 3], list(range(10, 45)), list(range(10, 80)), [7] * 17]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.25,
    )
    made = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(made)
    return str(made)


def generate(folder, dtype, **config):
    """Greedy and seeded tokens by handle."""
    import numpy as np

    from octavo.core.config.loading import load_config
    from octavo.core.config.resolve import resolve
    from octavo.core.engine.builder import build_engine
    from octavo.core.messages import EngineRequest
    from octavo.core.registry import Registry
    from octavo.core.sampling_params import SamplingParams
    from octavo.core.testing.fake_engine import Collector

    mapping = {
        "model": {"source": folder, "dtype": dtype},
        "kv_cache": {"num_blocks": 60},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        "executor": {"device": "cuda"},
        **config,
    }
    registry = Registry.discover()
    engine = build_engine(resolve(load_config(mapping=mapping), registry), registry)
    try:
        collector = Collector(engine)
        for handle, prompt in enumerate(PROMPTS, 1):
            engine.add(
                EngineRequest(
                    handle=handle,
                    request_id=str(handle),
                    token_ids=np.asarray(prompt, np.int32),
                    sampling=SamplingParams(
                        max_tokens=10, temperature=float(handle % 2), top_k=30, ignore_eos=True
                    ),
                    seed=handle,
                    max_tokens=10,
                )
            )
        collector.run()
        return [collector.tokens[handle] for handle in range(1, len(PROMPTS) + 1)]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def reference(folder):
    return generate(folder, "float32", attention={"backend": "torch"}, sampler={"backend": "torch"})


@pytest.mark.parametrize("attention", ["triton", "flex"])
@pytest.mark.parametrize("sampler", ["torch", "triton"])
def test_engine_in_float32(folder, reference, attention, sampler):
    got = generate(
        folder, "float32", attention={"backend": attention}, sampler={"backend": sampler}
    )
    assert got == reference


@pytest.mark.parametrize(
    "attention",
    [
        {"backend": "flashinfer"},
        {"backend": "triton"},
        {"prefill": "flashinfer", "decode": "triton"},
        {"backend": "auto"},
    ],
)
def test_engine_in_bfloat16_runs(folder, attention):
    if "flashinfer" in attention.values():
        pytest.importorskip("flashinfer")
    first = generate(folder, "bfloat16", attention=attention)
    assert all(len(tokens) == 10 for tokens in first)
    assert generate(folder, "bfloat16", attention=attention) == first


@pytest.mark.parametrize("attention", ["triton", "torch"])
def test_engine_with_the_fused_decoder(folder, reference, attention):
    got = generate(
        folder,
        "float32",
        attention={"backend": attention},
        sampler={"backend": "triton"},
        graph={"runner": "triton"},
    )
    assert got == reference


@pytest.mark.parametrize("attention", ["triton", "flashinfer"])
@pytest.mark.parametrize("runner", ["compile", "cuda_graph"])
def test_engine_compiled_and_captured(folder, attention, runner):
    """Chunks and decodes of every batch size give what they give eagerly."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    dtype = "bfloat16" if attention == "flashinfer" else "float32"
    eager = generate(folder, dtype, attention={"backend": attention}, graph={"runner": "eager"})
    got = generate(folder, dtype, attention={"backend": attention}, graph={"runner": runner})
    same = sum(mine == other for mine, other in zip(got, eager, strict=True))
    assert same == len(eager) if dtype == "float32" else same >= len(eager) - 2


def test_swapped_sequences_go_on(folder, reference):
    got = generate(
        folder,
        "float32",
        attention={"backend": "triton"},
        sampler={"backend": "triton"},
        kv_cache={"num_blocks": 9},
        preemption={"policy": "swap", "swap_space": 2**22},
    )
    assert got == reference
