"""Engines around real models, and transformers' own answers to compare with."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder with a random two-layer Llama, and the transformers module it came from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    return folder, model


REFERENCE = {
    "model": {"quantization": "none"},
    "attention": {"backend": "torch"},
    "graph": {"runner": "eager"},
    "sampler": {"backend": "torch"},
}
"""The parts that compute with torch's operators, in place of the best that run here."""


AHEAD = {"name": "local", "max_in_flight": 2}
"""A step is launched before the tokens of the one before it are known to the host."""


@pytest.fixture(
    params=[
        pytest.param(("local", {}), id="local"),
        pytest.param(("local", REFERENCE), id="reference"),
        pytest.param((AHEAD, {}), id="ahead"),
        pytest.param(("wire", {}), id="wire", marks=pytest.mark.slow),
        pytest.param(("threaded", {}), id="threaded", marks=pytest.mark.slow),
    ]
)
def defaults(request):
    """(executor, further configuration) of every test that does not say otherwise: each parity
    test runs on all."""
    return request.param


@pytest.fixture
def make_engine(tiny_model, defaults):
    """Engines from a nested mapping of configuration; all are closed at the end."""
    from octavo.core.registry import Registry
    from octavo.engine.builder import build_engine
    from octavo.engine.resolve import resolve
    from octavo.frontend.config import load_config

    engines = []

    def make(config=None, source=None):
        mapping = {"model": {"source": str(source or tiny_model[0])}}
        mapping["kv_cache"] = {"num_blocks": 200}
        mapping["executor"] = {"kind": defaults[0]}
        mapping["scheduler"] = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
        for given in (defaults[1], config or {}):
            for section, values in given.items():
                mapping.setdefault(section, {}).update(values)
        registry = Registry.discover()
        engine = build_engine(resolve(load_config(mapping=mapping), registry), registry)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def prompts():
    """Prompts with shared prefixes, around multiples of every block size that is tried."""
    generator = np.random.default_rng(7)
    base = generator.integers(3, 160, 80).tolist()
    lengths = [1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65]
    shared = [base[:length] for length in lengths]
    own = [generator.integers(3, 160, length).tolist() for length in (5, 16, 40)]
    forks = [[*base[:20], token] for token in range(10, 18)]
    return shared + own + forks
