"""Conformance suites: what every implementation of a contract kind must do, one class a kind.

Public as `octavo.testing`; docs/conformance.md says how to use them.
"""

from __future__ import annotations

import importlib

from octavo.core.errors import nearest
from octavo.testing.conformance.base import ConformanceSuite

SUITES: dict[str, str] = {
    "scheduler_policy": "SchedulerPolicySuite",
    "kv_cache_manager": "KVCacheManagerSuite",
    "eviction_policy": "EvictionPolicySuite",
    "preemption_policy": "PreemptionPolicySuite",
    "attention_backend": "AttentionBackendSuite",
    "sampler": "SamplerSuite",
    "graph_runner": "GraphRunnerSuite",
    "executor": "ExecutorSuite",
    "model": "ModelSuite",
    "weight_source": "WeightSourceSuite",
    "tokenizer": "TokenizerSuite",
    "quantization": "QuantizationSuite",
    "logits_processor": "LogitsProcessorSuite",
    "observer": "ObserverSuite",
    "engine_extension": "EngineExtensionSuite",
    "grammar_engine": "GrammarEngineSuite",
    "tool_parser": "ToolParserSuite",
    "reasoning_parser": "ReasoningParserSuite",
    "route": "RouteSuite",
}
"""The class of each kind, a name of `octavo.testing`."""


def suite_of(kind: str) -> type[ConformanceSuite]:
    """The suite of a kind. Raises `ValueError` for a kind without one."""
    if kind not in SUITES:
        raise ValueError(f"there is no conformance suite for '{kind}'; {nearest(kind, SUITES)}")
    suite: type[ConformanceSuite] = getattr(importlib.import_module("octavo.testing"), SUITES[kind])
    return suite
