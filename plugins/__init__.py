"""Built-in policies and other implementations, registered through the hooks for third parties."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, hookimpl


@hookimpl
def octavo_scheduler_policies() -> list[Provider[Any]]:
    from octavo.plugins.scheduler_policies import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_kv_cache_managers() -> list[Provider[Any]]:
    from octavo.plugins.kv_cache_managers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_eviction_policies() -> list[Provider[Any]]:
    from octavo.plugins.eviction import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_preemption_policies() -> list[Provider[Any]]:
    from octavo.plugins.preemption import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_executors() -> list[Provider[Any]]:
    from octavo.plugins.executors import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_samplers() -> list[Provider[Any]]:
    from octavo.plugins.samplers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_logits_processors() -> list[Provider[Any]]:
    from octavo.plugins.logits_processors import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_grammar_engines() -> list[Provider[Any]]:
    from octavo.plugins.grammar_engines import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_observers() -> list[Provider[Any]]:
    from octavo.plugins.observers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_engine_extensions() -> list[Provider[Any]]:
    from octavo.plugins.extensions import PROVIDERS

    return PROVIDERS
