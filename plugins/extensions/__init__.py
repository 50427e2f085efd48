"""Built-in engine extensions. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="structured_output",
        factory="octavo.plugins.structured_output.extension:make_structured_output",
        contract_version="0",
        rank=40,
        summary="outputs that keep to a JSON schema, regular expression, choice or grammar",
    ),
    Provider(
        name="timelines",
        factory="octavo.plugins.extensions.timelines:Timelines",
        contract_version="0",
        rank=30,
        summary="what happened to a request, step by step (docs/timelines.md)",
    ),
    Provider(
        name="overview",
        factory="octavo.plugins.extensions.overview:Overview",
        contract_version="0",
        rank=20,
        summary="KV blocks, live and recent requests, for the dashboard",
    ),
    Provider(
        name="plugin_times",
        factory="octavo.plugins.extensions.plugin_times:PluginTimesReport",
        contract_version="0",
        rank=10,
        summary="calls and seconds by implementation, among the engine's metrics",
    ),
]
