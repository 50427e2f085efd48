"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="otel_spans",
        factory="octavo_otel_spans.observer:OtelSpansObserver",
        options="octavo_otel_spans.observer:OtelSpansOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="spans of requests for OpenTelemetry",
    ),
]


@hookimpl
def octavo_observers() -> list[Provider[Any]]:
    return PROVIDERS
