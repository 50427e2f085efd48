"""The suites of Octavo's own implementations, for our tests and `octavo plugins check octavo`."""

from __future__ import annotations

import os

from octavo.core.registry import Registered
from octavo.core.sampling_params import SamplingParams
from octavo.testing.conformance.attention_backend import AttentionBackendSuite
from octavo.testing.conformance.base import registry
from octavo.testing.conformance.engine_extension import EngineExtensionSuite
from octavo.testing.conformance.eviction_policy import EvictionPolicySuite
from octavo.testing.conformance.executor import ExecutorSuite
from octavo.testing.conformance.grammar_engine import GrammarEngineSuite
from octavo.testing.conformance.graph_runner import GraphRunnerSuite
from octavo.testing.conformance.kv_cache_manager import KVCacheManagerSuite
from octavo.testing.conformance.logits_processor import LogitsProcessorSuite
from octavo.testing.conformance.model import ModelSuite
from octavo.testing.conformance.observer import ObserverSuite
from octavo.testing.conformance.preemption_policy import PreemptionPolicySuite
from octavo.testing.conformance.quantization import QuantizationSuite
from octavo.testing.conformance.sampler import SamplerSuite
from octavo.testing.conformance.scheduler_policy import SchedulerPolicySuite
from octavo.testing.conformance.tokenizer import TokenizerSuite
from octavo.testing.conformance.weight_source import WeightSourceSuite


def known(kind: str, name: str) -> Registered:
    """What the registry knows under a name."""
    return registry().providers(kind)[name]


class TestFcfs(SchedulerPolicySuite):
    entry = known("scheduler_policy", "fcfs")


class TestPriority(SchedulerPolicySuite):
    entry = known("scheduler_policy", "priority")
    options = {"ageing_s": 20}


class TestSjf(SchedulerPolicySuite):
    entry = known("scheduler_policy", "sjf")
    options = {"tokens_per_s": 0.5}


class TestFair(SchedulerPolicySuite):
    entry = known("scheduler_policy", "fair")
    options = {"weights": {"a": 3}}


class TestDeadline(SchedulerPolicySuite):
    entry = known("scheduler_policy", "deadline")
    options = {"classes": {0: {"ttft_s": 5, "itl_s": 3}, 1: {"ttft_s": 90}}, "min_chunk": 1}


class TestComposed(SchedulerPolicySuite):
    entry = known("scheduler_policy", "composed")
    options = {"policies": [{"name": "priority", "ageing_s": 20}, "fair"]}


class TestPaged(KVCacheManagerSuite):
    entry = known("kv_cache_manager", "paged")


class TestRadix(KVCacheManagerSuite):
    entry = known("kv_cache_manager", "radix")


class TestUnshared(KVCacheManagerSuite):
    entry = known("kv_cache_manager", "none")


class TestLru(EvictionPolicySuite):
    entry = known("eviction_policy", "lru")


class TestLfu(EvictionPolicySuite):
    entry = known("eviction_policy", "lfu")


class TestPrefixAware(EvictionPolicySuite):
    entry = known("eviction_policy", "prefix_aware")


class TestRecompute(PreemptionPolicySuite):
    entry = known("preemption_policy", "recompute")


class TestSwap(PreemptionPolicySuite):
    entry = known("preemption_policy", "swap")


class TestCostModel(PreemptionPolicySuite):
    entry = known("preemption_policy", "cost_model")


class TestTorchAttention(AttentionBackendSuite):
    entry = known("attention_backend", "torch")


class TestCpuAttention(AttentionBackendSuite):
    entry = known("attention_backend", "cpu")


class TestTorchSampler(SamplerSuite):
    entry = known("sampler", "torch")


class TestCpuSampler(SamplerSuite):
    entry = known("sampler", "cpu")


class TestEager(GraphRunnerSuite):
    entry = known("graph_runner", "eager")


class TestCompile(GraphRunnerSuite):
    entry = known("graph_runner", "compile")
    options = {"backend": "aot_eager"}
    config = {"attention": {"backend": "torch"}, "model": {"quantization": "none"}}


class TestNative(GraphRunnerSuite):
    entry = known("graph_runner", "native")
    config = {"attention": {"backend": "cpu"}, "model": {"quantization": "packed"}}


class TestUnquantized(QuantizationSuite):
    entry = known("quantization", "none")


class TestPacked(QuantizationSuite):
    entry = known("quantization", "packed")


class TestInt8(QuantizationSuite):
    entry = known("quantization", "int8")
    error = 0.01


class TestInt4(QuantizationSuite):
    entry = known("quantization", "int4")
    error = 0.12


class TestDecoder(ModelSuite):
    entry = known("model", "decoder")


class TestBias(LogitsProcessorSuite):
    entry = known("logits_processor", "bias")
    params = (
        SamplingParams(logit_bias={3: 5.0, 60: -100.0}),
        SamplingParams(logit_bias=dict.fromkeys(range(40), 2.5)),
    )
    plain = SamplingParams()


class TestAllowedTokens(LogitsProcessorSuite):
    entry = known("logits_processor", "allowed_tokens")
    params = (
        SamplingParams(allowed_token_ids=[1, 2, 3]),
        SamplingParams(allowed_token_ids=list(range(10, 60))),
    )
    plain = SamplingParams()


class TestPenalties(LogitsProcessorSuite):
    entry = known("logits_processor", "penalties")
    params = (
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(frequency_penalty=0.7, presence_penalty=-0.4),
        SamplingParams(presence_penalty=1.9, repetition_penalty=0.5),
    )
    plain = SamplingParams()


class TestBadWords(LogitsProcessorSuite):
    entry = known("logits_processor", "bad_words")
    params = (
        SamplingParams(bad_words=["x"], bad_words_token_ids=[[9], [21, 3]]),
        SamplingParams(bad_words=["y"], bad_words_token_ids=[[t, t + 1] for t in range(60)]),
    )
    plain = SamplingParams()


class TestMinTokens(LogitsProcessorSuite):
    entry = known("logits_processor", "min_tokens")
    params = (SamplingParams(min_tokens=4), SamplingParams(min_tokens=2, stop_token_ids=[8, 9]))
    plain = SamplingParams()


class TestLocal(ExecutorSuite):
    entry = known("executor", "local")


class TestWire(ExecutorSuite):
    entry = known("executor", "wire")


class TestThreaded(ExecutorSuite):
    entry = known("executor", "threaded")


class TestSimulated(ExecutorSuite):
    entry = known("executor", "simulated")
    options = {
        "accelerator": "h100",
        "model": {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    }


class TestFolder(WeightSourceSuite):
    entry = known("weight_source", "folder")


class TestDummy(WeightSourceSuite):
    entry = known("weight_source", "dummy")
    options = {"std": 0.3}


class TestFast(TokenizerSuite):
    entry = known("tokenizer", "fast")


class TestTransformers(TokenizerSuite):
    entry = known("tokenizer", "transformers")


class TestXGrammar(GrammarEngineSuite):
    entry = known("grammar_engine", "xgrammar")


class TestNoGrammar(GrammarEngineSuite):
    entry = known("grammar_engine", "none")
    refuses_everything = True


class TestStepTrace(ObserverSuite):
    entry = known("observer", "step_trace")
    options = {"path": os.devnull}


class TestStructuredOutput(EngineExtensionSuite):
    entry = known("engine_extension", "structured_output")


class TestTimelines(EngineExtensionSuite):
    entry = known("engine_extension", "timelines")
    config = {"observability": {"timelines": 20}}


class TestOverview(EngineExtensionSuite):
    entry = known("engine_extension", "overview")


class TestPluginTimes(EngineExtensionSuite):
    entry = known("engine_extension", "plugin_times")


class TestPrometheus(ObserverSuite):
    entry = known("observer", "prometheus")
