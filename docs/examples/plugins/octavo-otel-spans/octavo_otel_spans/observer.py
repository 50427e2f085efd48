"""Observer `otel_spans`: a span a request for OpenTelemetry, with its phases as child spans.

Spans go to whatever tracer provider the process has set up, or, with `endpoint`, to an OTLP collector
(needs `opentelemetry-exporter-otlp-proto-http`). Attributes follow OpenTelemetry's conventions for
generative AI where those name one (`gen_ai.usage.input_tokens`, ...).
"""

from __future__ import annotations

import time
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from pydantic import Field

from octavo.core.contracts import Options
from octavo.core.contracts.observer import Observer, ObserverContext, RequestRecord
from octavo.core.errors import ConfigError


class OtelSpansOptions(Options):
    """Where spans go."""

    endpoint: str | None = Field(
        default=None,
        description="URL of an OTLP collector (http://localhost:4318/v1/traces); not given: the "
        "tracer provider of the process.",
    )
    service_name: str = Field(default="octavo", description="`service.name` of the spans.")


class OtelSpansObserver(Observer):
    """Spans are made when a request has ended, from its record, so that running ones cost
    nothing."""

    def __init__(self, options: OtelSpansOptions, context: ObserverContext) -> None:
        self._model = str(context.report.get("source", ""))
        self._own: TracerProvider | None = None
        if options.endpoint is not None:
            self._own = _provider(options.endpoint, options.service_name)
        self._tracer: Tracer = trace.get_tracer("octavo", tracer_provider=self._own)
        # The engine's clock is monotonic; spans want nanoseconds since 1970.
        self._offset = time.time() - time.monotonic()

    def on_request(self, record: RequestRecord) -> None:
        span = self._tracer.start_span(
            "request",
            start_time=self._ns(record.arrival),
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": record.request_id,
                "gen_ai.usage.input_tokens": record.num_prompt,
                "gen_ai.usage.output_tokens": record.num_output,
                "gen_ai.response.finish_reasons": [record.finish_reason],
                "octavo.cached_tokens": record.num_cached,
                "octavo.preemptions": record.num_preemptions,
            },
        )
        if record.finish_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        admitted = record.admitted if record.admitted is not None else record.finished
        first = record.first_token if record.first_token is not None else record.finished
        self._phase(span, "queued", record.arrival, admitted)
        if record.admitted is not None:
            self._phase(span, "prefill", admitted, first)
        if record.first_token is not None:
            self._phase(span, "decode", first, record.finished)
        span.end(self._ns(record.finished))

    def _phase(self, parent: Span, name: str, first: float, last: float) -> None:
        context = trace.set_span_in_context(parent)
        child = self._tracer.start_span(name, context=context, start_time=self._ns(first))
        child.end(self._ns(max(first, last)))

    def _ns(self, seconds: float) -> int:
        return int((seconds + self._offset) * 1e9)

    def close(self) -> None:
        if self._own is not None:
            self._own.shutdown()


def _provider(endpoint: str, service_name: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise ConfigError(
            "otel_spans: `endpoint` needs the package opentelemetry-exporter-otlp-proto-http"
        ) from None
    exporter: Any = OTLPSpanExporter(endpoint=endpoint)
    provider = TracerProvider(resource=Resource.create({"service.name": service_name}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
