"""The contracts of the engine's kinds: one module a kind, and `KINDS`, which lists them.

Importing this package imports no torch. A kind has a name (`scheduler_policy`), an abstract class
that implementations inherit from, a context class that their factory gets, one hook that returns
providers, and a contract version: "0" is free to change, "1" and later follow docs/stability.md.
Plugins declare further kinds (`octavo.core.contracts.kind`); `Registry.kinds` has them all.
"""

from __future__ import annotations

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
    sampler,
    scheduler_policy,
    tokenizer,
    weight_source,
)
from octavo.core.contracts.kind import Kind
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

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (
        scheduler_policy,
        kv_cache_manager,
        eviction_policy,
        preemption_policy,
        attention_backend,
        sampler,
        graph_runner,
        executor,
        model,
        weight_source,
        tokenizer,
        quantization,
        logits_processor,
        grammar_engine,
        observer,
        engine_extension,
    )
}
"""By name, in the order in which `auto` is settled."""

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
