"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="perplexity",
        factory="octavo_perplexity.route:PerplexityRoutes",
        options="octavo_perplexity.route:PerplexityOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="how probable the model finds a text",
    ),
]


@hookimpl
def octavo_routes() -> list[Provider[Any]]:
    return PROVIDERS
