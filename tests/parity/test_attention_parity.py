"""Engines with other attention backends, on a CPU, give the reference's tokens."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.errors import PluginUnavailable
from octavo.core.messages import EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.testing.fake_engine import Collector

OUTPUT = 3
PROMPTS = [3, 18]


def tokens(engine):
    """Greedy and seeded tokens of a few prompts that share prefixes, all at once."""
    generator = np.random.default_rng(3)
    base = generator.integers(3, 160, 40).astype(np.int32)
    collector = Collector(engine)
    for handle, length in enumerate(PROMPTS, 1):
        engine.add(
            EngineRequest(
                handle=handle,
                request_id=str(handle),
                token_ids=base[:length],
                sampling=SamplingParams(
                    max_tokens=OUTPUT, temperature=float(handle == 2), ignore_eos=True
                ),
                seed=handle,
                max_tokens=OUTPUT,
            )
        )
    collector.run()
    return [collector.tokens[handle] for handle in range(1, len(PROMPTS) + 1)]


@pytest.fixture
def defaults():
    return "local", {"model": {"quantization": "none"}}


@pytest.fixture
def build(make_engine):
    def make(attention, runner="eager", **config):
        return make_engine(
            {
                "attention": attention,
                "kv_cache": {"num_blocks": 40, "block_size": 16},
                "scheduler": {"max_num_seqs": 4, "max_num_batched_tokens": 16},
                "graph": {"runner": runner},
                **config,
            }
        )

    return make


@pytest.fixture
def expected(build):
    return tokens(build({"backend": "torch"}))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_triton_in_its_interpreter(build, expected):
    from octavo.backends.triton.support import interpreting

    if not interpreting():
        pytest.skip("a GPU is here")
    engine = build({"backend": {"name": "triton", "num_splits": 2}})
    assert tokens(engine) == expected
    reasons = {choice.kind: choice.reason for choice in engine.report.plugins}
    assert "named in the configuration" in reasons["attention_backend"]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_fused_decoder_and_the_draw_in_kernels(build, expected):
    from octavo.backends.triton.support import interpreting

    if not interpreting():
        pytest.skip("a GPU is here")
    engine = build({"backend": "torch"}, "triton", sampler={"backend": "triton"})
    assert tokens(engine) == expected
    names = {choice.kind: choice.name for choice in engine.report.plugins}
    assert (names["graph_runner"], names["sampler"]) == ("triton", "triton")


def test_the_interpreter_is_never_chosen_by_auto(build):
    engine = build({"backend": "auto"})
    chosen = next(item for item in engine.report.plugins if item.kind == "attention_backend")
    assert chosen.name != "triton"
    why = dict(chosen.rejected)["triton"]
    assert "only when named" in why or "needs device cuda" in why


@pytest.mark.parametrize(
    ("prefill", "decode"), [("torch", "flex"), ("flex", "torch"), ("torch", "torch")]
)
def test_one_backend_a_phase(build, expected, prefill, decode):
    engine = build({"prefill": prefill, "decode": decode})
    assert tokens(engine) == expected
    names = {item.kind: item.name for item in engine.report.plugins}
    if prefill == decode:
        assert names["attention_backend"] == prefill
    else:
        assert names["attention_backend (prefill)"] == prefill
        assert names["attention_backend (decode)"] == decode


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("torch", "triton"), pytest.param("triton", "cpu", marks=pytest.mark.slow)],
)
def test_phases_of_which_only_one_rotates(build, expected, prefill, decode):
    from octavo.backends.triton.support import interpreting

    if not interpreting():
        pytest.skip("a GPU is here")
    assert tokens(build({"prefill": prefill, "decode": decode})) == expected


def test_phases_without_a_common_layout_are_refused(build):
    with pytest.raises(PluginUnavailable, match=r"share no KV cache layout: prefill has kv/block"):
        build({"prefill": "torch", "decode": "cpu"})
