"""The contracts: one module a kind, and `KINDS`, which lists them.

Importing this package imports no torch. A kind has a name (`scheduler_policy`), an abstract class
that implementations inherit from, a context class that their factory gets, one hook that returns
providers, and a contract version: "0" is free to change, "1" and later follow docs/stability.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from octavo.core.contracts import (
    attention_backend,
    engine_extension,
    eviction_policy,
    executor,
    grammar_engine,
    graph_runner,
    kv_cache_manager,
    logits_processor,
    model,
    observer,
    preemption_policy,
    quantization,
    reasoning_parser,
    route,
    sampler,
    scheduler_policy,
    tokenizer,
    tool_parser,
    weight_source,
)
from octavo.core.contracts.provider import (
    Availability,
    NoOptions,
    Options,
    Platform,
    ProbeContext,
    Provider,
    Requirement,
    hookimpl,
    hookspec,
)


@dataclass(frozen=True)
class Kind:
    """name: in messages and `octavo plugins`. module: declares the hook. hook: its name. contract:
    the abstract class. context: what a factory gets. config_path: the YAML key that chooses."""

    name: str
    module: ModuleType
    hook: str
    contract: type[Any]
    context: type[Any]
    config_path: str
    version: str = "1"


def _kinds(*kinds: Kind) -> dict[str, Kind]:
    return {kind.name: kind for kind in kinds}


KINDS: dict[str, Kind] = _kinds(
    Kind(
        "scheduler_policy",
        scheduler_policy,
        "octavo_scheduler_policies",
        scheduler_policy.SchedulerPolicy,
        scheduler_policy.SchedulerPolicyContext,
        "scheduler.policy",
        "1.1",
    ),
    Kind(
        "kv_cache_manager",
        kv_cache_manager,
        "octavo_kv_cache_managers",
        kv_cache_manager.KVCacheManager,
        kv_cache_manager.KVCacheManagerContext,
        "kv_cache.manager",
        "1.1",
    ),
    Kind(
        "eviction_policy",
        eviction_policy,
        "octavo_eviction_policies",
        eviction_policy.EvictionPolicy,
        eviction_policy.EvictionPolicyContext,
        "kv_cache.eviction",
    ),
    Kind(
        "preemption_policy",
        preemption_policy,
        "octavo_preemption_policies",
        preemption_policy.PreemptionPolicy,
        preemption_policy.PreemptionPolicyContext,
        "preemption.policy",
    ),
    Kind(
        "attention_backend",
        attention_backend,
        "octavo_attention_backends",
        attention_backend.AttentionBackend,
        attention_backend.AttentionBackendContext,
        "attention.backend",
        "1.1",
    ),
    Kind(
        "sampler",
        sampler,
        "octavo_samplers",
        sampler.Sampler,
        sampler.SamplerContext,
        "sampler.backend",
        "1.2",
    ),
    Kind(
        "graph_runner",
        graph_runner,
        "octavo_graph_runners",
        graph_runner.GraphRunner,
        graph_runner.GraphRunnerContext,
        "graph.runner",
        "1.3",
    ),
    Kind(
        "executor",
        executor,
        "octavo_executors",
        executor.Executor,
        executor.ExecutorContext,
        "executor.kind",
        "1.3",
    ),
    Kind(
        "model",
        model,
        "octavo_models",
        model.CausalLM,
        model.ModelContext,
        "model.implementation",
        "1.1",
    ),
    Kind(
        "weight_source",
        weight_source,
        "octavo_weight_sources",
        weight_source.WeightSource,
        weight_source.WeightSourceContext,
        "model.weight_source",
        "1.1",
    ),
    Kind(
        "tokenizer",
        tokenizer,
        "octavo_tokenizers",
        tokenizer.Tokenizer,
        tokenizer.TokenizerContext,
        "model.tokenizer_backend",
        "1.2",
    ),
    Kind(
        "tool_parser",
        tool_parser,
        "octavo_tool_parsers",
        tool_parser.ToolParser,
        tool_parser.ToolParserContext,
        "server.tool_parser",
    ),
    Kind(
        "reasoning_parser",
        reasoning_parser,
        "octavo_reasoning_parsers",
        reasoning_parser.ReasoningParser,
        reasoning_parser.ReasoningParserContext,
        "server.reasoning_parser",
    ),
    Kind(
        "quantization",
        quantization,
        "octavo_quantizations",
        quantization.QuantizationMethod,
        quantization.QuantizationContext,
        "model.quantization",
    ),
    Kind(
        "logits_processor",
        logits_processor,
        "octavo_logits_processors",
        logits_processor.LogitsProcessor,
        logits_processor.LogitsProcessorContext,
        "logits_processors",
        "1.1",
    ),
    Kind(
        "grammar_engine",
        grammar_engine,
        "octavo_grammar_engines",
        grammar_engine.GrammarEngine,
        grammar_engine.GrammarEngineContext,
        "structured_outputs.engine",
        "1.1",
    ),
    Kind(
        "observer",
        observer,
        "octavo_observers",
        observer.Observer,
        observer.ObserverContext,
        "observers",
    ),
    Kind(
        "engine_extension",
        engine_extension,
        "octavo_engine_extensions",
        engine_extension.EngineExtension,
        engine_extension.EngineExtensionContext,
        "extensions",
        "0",
    ),
    Kind(
        "route",
        route,
        "octavo_routes",
        route.RoutePlugin,
        route.RouteContext,
        "routes",
    ),
)

__all__ = [
    "KINDS",
    "Availability",
    "Kind",
    "NoOptions",
    "Options",
    "Platform",
    "ProbeContext",
    "Provider",
    "Requirement",
    "hookimpl",
    "hookspec",
]
