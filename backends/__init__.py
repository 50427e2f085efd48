"""Built-in implementations that touch a device."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, hookimpl


@hookimpl
def octavo_attention_backends() -> list[Provider[Any]]:
    from octavo.backends.attention import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_graph_runners() -> list[Provider[Any]]:
    from octavo.backends.graph_runners import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_samplers() -> list[Provider[Any]]:
    from octavo.backends.samplers import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_quantizations() -> list[Provider[Any]]:
    from octavo.backends.quantization import PROVIDERS

    return PROVIDERS
