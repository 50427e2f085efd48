"""Octavo's conformance suites and test helpers, for packages that offer implementations.

    from octavo.testing import SchedulerPolicySuite

    class TestMyPolicy(SchedulerPolicySuite):
        provider = PROVIDERS[0]

Everything is imported lazily. docs/conformance.md describes each suite and the pytest fixtures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_CONFORMANCE = "octavo.testing.conformance"
_SERVER = "octavo.server.testing"

_WHERE = {
    "AttentionBackendSuite": f"{_CONFORMANCE}.attention_backend",
    "EvictionPolicySuite": f"{_CONFORMANCE}.eviction_policy",
    "ExecutorSuite": f"{_CONFORMANCE}.executor",
    "GrammarEngineSuite": f"{_CONFORMANCE}.grammar_engine",
    "GraphRunnerSuite": f"{_CONFORMANCE}.graph_runner",
    "KVCacheManagerSuite": f"{_CONFORMANCE}.kv_cache_manager",
    "LogitsProcessorSuite": f"{_CONFORMANCE}.logits_processor",
    "ModelSuite": f"{_CONFORMANCE}.model",
    "ObserverSuite": f"{_CONFORMANCE}.observer",
    "EngineExtensionSuite": f"{_CONFORMANCE}.engine_extension",
    "PreemptionPolicySuite": f"{_CONFORMANCE}.preemption_policy",
    "QuantizationSuite": f"{_CONFORMANCE}.quantization",
    "ReasoningParserSuite": f"{_SERVER}.reasoning_parser",
    "RouteSuite": f"{_SERVER}.route",
    "SamplerSuite": f"{_CONFORMANCE}.sampler",
    "SchedulerPolicySuite": f"{_CONFORMANCE}.scheduler_policy",
    "TokenizerSuite": f"{_CONFORMANCE}.tokenizer",
    "ToolParserSuite": f"{_SERVER}.tool_parser",
    "WeightSourceSuite": f"{_CONFORMANCE}.weight_source",
    "ConformanceSuite": f"{_CONFORMANCE}.base",
    "NotApplicable": f"{_CONFORMANCE}.base",
    "Verdict": f"{_CONFORMANCE}.base",
    "run_suite": f"{_CONFORMANCE}.base",
    "suite_of": _CONFORMANCE,
    "asynchronous_device": f"{_CONFORMANCE}.device",
    "waiting_allowed": f"{_CONFORMANCE}.device",
    "StepLog": "octavo.testing.step_log",
    "make_fake_engine": "octavo.testing.fake_engine",
    "write_tiny_model": "octavo.testing.tiny_model",
}

__all__ = [
    "AttentionBackendSuite",
    "ConformanceSuite",
    "EngineExtensionSuite",
    "EvictionPolicySuite",
    "ExecutorSuite",
    "GrammarEngineSuite",
    "GraphRunnerSuite",
    "KVCacheManagerSuite",
    "LogitsProcessorSuite",
    "ModelSuite",
    "NotApplicable",
    "ObserverSuite",
    "PreemptionPolicySuite",
    "QuantizationSuite",
    "ReasoningParserSuite",
    "RouteSuite",
    "SamplerSuite",
    "SchedulerPolicySuite",
    "StepLog",
    "TokenizerSuite",
    "ToolParserSuite",
    "Verdict",
    "WeightSourceSuite",
    "asynchronous_device",
    "make_fake_engine",
    "run_suite",
    "suite_of",
    "waiting_allowed",
    "write_tiny_model",
]

if TYPE_CHECKING:
    from octavo.testing.conformance import suite_of
    from octavo.testing.conformance.attention_backend import AttentionBackendSuite
    from octavo.testing.conformance.base import (
        ConformanceSuite,
        NotApplicable,
        Verdict,
        run_suite,
    )
    from octavo.testing.conformance.device import asynchronous_device, waiting_allowed
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
    from octavo.testing.fake_engine import make_fake_engine
    from octavo.testing.step_log import StepLog
    from octavo.testing.tiny_model import write_tiny_model


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'octavo.testing' has no attribute '{name}'")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
