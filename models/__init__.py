"""Model families, weight sources and tokenizers."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider, hookimpl


@hookimpl
def octavo_models() -> list[Provider[Any]]:
    from octavo.models.families import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_weight_sources() -> list[Provider[Any]]:
    from octavo.models.weight_sources import PROVIDERS

    return PROVIDERS


@hookimpl
def octavo_tokenizers() -> list[Provider[Any]]:
    from octavo.models.tokenizers import PROVIDERS

    return PROVIDERS
