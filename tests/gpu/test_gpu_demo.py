"""The demo model on a GPU: transformers' tokens in float32, whatever the parts; in bfloat16 what
rounding allows."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

TEXTS = [
    "Hi",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Grüße aus München! Heute",
    "The history of computing is older than the machines that we call computers. People counted "
    "with stones, with knots in strings and with beads on wires, and they wrote tables of "
    "logarithms so that a multiplication became an addition. Charles Babbage wanted a machine to "
    "print such tables without mistakes.",
]
OUTPUT = 16
POOL = {"kv_cache": {"num_blocks": 80}, "scheduler": {"max_num_batched_tokens": 32}}


@pytest.fixture(scope="module")
def demo(tmp_path_factory, rehearsing):
    """(section `model`, requests). Where the model's package is not installed, and in a rehearsal:
    another model of its kind with random weights, and random prompts."""
    from octavo.bench.gpu.models import DEMO_PACKAGE, model_section

    if importlib.util.find_spec(DEMO_PACKAGE) is None or rehearsing:
        name = "tiny" if rehearsing else "demo"
        section = model_section(name, tmp_path_factory.mktemp("demo"))
        section["weight_source"] |= {"std": 0.08}
        random = np.random.default_rng(0)
        prompts = [random.integers(3, 500, length).tolist() for length in (3, 20, 100)]
    else:
        section = model_section("demo", tmp_path_factory.mktemp("demo"))
        prompts = _encoded(section)
    params = {"temperature": 0.0, "logprobs": 5, "max_tokens": OUTPUT}
    return {**section, "max_model_len": 512}, [(prompt, params) for prompt in prompts]


def _encoded(section):
    from octavo.core.registry import Registry
    from octavo.engine.resolve import resolve
    from octavo.engine.tokenizer import make_tokenizer
    from octavo.frontend.config import load_config

    registry = Registry.discover()
    mapping = {"model": section, "executor": {"device": "cpu"}}
    tokenizer = make_tokenizer(resolve(load_config(mapping=mapping), registry), registry)
    return [list(tokenizer.encode(text)) for text in TEXTS]


@pytest.fixture(scope="module")
def run(demo, answer):
    section, requests = demo

    def run(attention, dtype, runner="eager", **parts):
        parts = {**POOL, "graph": {"runner": runner}, **parts}
        return answer(
            section["source"], requests, dtype, model=section, attention=attention, **parts
        )

    return run


@pytest.fixture(scope="module")
def references(run):
    """By dtype, made when asked for."""
    made = {}

    def reference(dtype):
        if dtype not in made:
            made[dtype] = run("torch", dtype, sampler={"backend": "torch"})
        return made[dtype]

    return reference


def test_the_demo_model_has_the_tokens_of_transformers(demo, references, device, make_engine):
    section, requests = demo
    if "weight_source" in section:
        pytest.skip("a model with random weights stands in")
    from transformers import AutoModelForCausalLM

    engine = make_engine(section["source"], model=section, **POOL)
    folder = engine.resolved.weight_source.tokenizer_dir()
    engine.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
    for (prompt, _), tokens in zip(requests, references("float32").tokens, strict=True):
        ids = torch.tensor([prompt], device=device)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=OUTPUT,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert out[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize(
    ("attention", "runner"),
    [
        ("triton", "eager"),
        ("triton", "triton"),
        ("triton", "compile"),
        ("triton", "cuda_graph"),
        ("torch", "triton"),
        ("flex", "eager"),
    ],
)
def test_the_demo_model_in_float32(run, references, attention, runner):
    found = run(attention, "float32", runner)
    assert found.tokens == references("float32").tokens
    found.check_like(references("float32"), "float32")


@pytest.mark.parametrize("attention", ["flashinfer", "triton", "mixed"])
@pytest.mark.parametrize("runner", ["triton", "cuda_graph"])
def test_the_demo_model_in_bfloat16(run, references, attention, runner):
    run(attention, "bfloat16", runner).check_like(references("bfloat16"), "bfloat16")
