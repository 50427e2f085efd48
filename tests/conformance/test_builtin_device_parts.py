"""The built-in parts that run on a device keep their contracts."""

from __future__ import annotations

from octavo.core.sampling_params import SamplingParams
from octavo.core.testing.conformance.attention_backend import AttentionBackendSuite
from octavo.core.testing.conformance.base import registry
from octavo.core.testing.conformance.graph_runner import GraphRunnerSuite
from octavo.core.testing.conformance.logits_processor import LogitsProcessorSuite
from octavo.core.testing.conformance.model import ModelSuite
from octavo.core.testing.conformance.quantization import QuantizationSuite
from octavo.core.testing.conformance.sampler import SamplerSuite


def entry(kind, name):
    return registry().providers(kind)[name]


class TestTorchAttention(AttentionBackendSuite):
    entry = entry("attention_backend", "torch")


class TestCpuAttention(AttentionBackendSuite):
    entry = entry("attention_backend", "cpu")


class TestTorchSampler(SamplerSuite):
    entry = entry("sampler", "torch")


class TestEager(GraphRunnerSuite):
    entry = entry("graph_runner", "eager")


class TestNative(GraphRunnerSuite):
    entry = entry("graph_runner", "native")
    config = {"attention": {"backend": "cpu"}, "model": {"quantization": "packed"}}


class TestUnquantized(QuantizationSuite):
    entry = entry("quantization", "none")


class TestPacked(QuantizationSuite):
    entry = entry("quantization", "packed")


class TestInt8(QuantizationSuite):
    entry = entry("quantization", "int8")
    error = 0.01


class TestInt4(QuantizationSuite):
    entry = entry("quantization", "int4")
    error = 0.12


class TestDecoder(ModelSuite):
    entry = entry("model", "decoder")


class TestBias(LogitsProcessorSuite):
    entry = entry("logits_processor", "bias")
    params = (
        SamplingParams(logit_bias={3: 5.0, 60: -100.0}),
        SamplingParams(logit_bias=dict.fromkeys(range(40), 2.5)),
    )
    plain = SamplingParams()


class TestAllowedTokens(LogitsProcessorSuite):
    entry = entry("logits_processor", "allowed_tokens")
    params = (
        SamplingParams(allowed_token_ids=[1, 2, 3]),
        SamplingParams(allowed_token_ids=list(range(10, 60))),
    )
    plain = SamplingParams()


class TestPenalties(LogitsProcessorSuite):
    entry = entry("logits_processor", "penalties")
    params = (
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingParams(presence_penalty=1.9, repetition_penalty=0.5),
    )
    plain = SamplingParams()


class TestBadWords(LogitsProcessorSuite):
    entry = entry("logits_processor", "bad_words")
    params = (
        SamplingParams(bad_words=["x"], bad_words_token_ids=[[9], [21, 3]]),
        SamplingParams(bad_words=["y"], bad_words_token_ids=[[t, t + 1] for t in range(60)]),
    )
    plain = SamplingParams()


class TestMinTokens(LogitsProcessorSuite):
    entry = entry("logits_processor", "min_tokens")
    params = (SamplingParams(min_tokens=4), SamplingParams(min_tokens=2, stop_token_ids=[8, 9]))
    plain = SamplingParams()
