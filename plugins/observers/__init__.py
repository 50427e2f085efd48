"""Built-in observers. Importing this imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="prometheus",
        factory="octavo.plugins.observers.prometheus.engine:PrometheusObserver",
        options="octavo.plugins.observers.prometheus.engine:PrometheusOptions",
        rank=-1,
        summary="counts for /metrics and /dashboard; the server adds it (docs/metrics.md)",
    ),
    Provider(
        name="step_trace",
        factory="octavo.plugins.observers.step_trace:StepTrace",
        options="octavo.plugins.observers.step_trace:StepTraceOptions",
        rank=-1,
        summary="a timeline of the steps as a Chrome trace, for Perfetto (`--trace-steps FILE`)",
    ),
]
