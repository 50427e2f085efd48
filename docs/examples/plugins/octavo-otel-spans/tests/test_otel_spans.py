"""Spans of real requests, through OpenTelemetry's own in-memory exporter."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from octavo.core.errors import ConfigError
from octavo.testing.tiny_model import generate, make_requests
from octavo_otel_spans import PROVIDERS


@pytest.fixture(scope="module")
def exported():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


def test_every_request_has_a_span_with_its_phases(octavo_engine, exported):
    engine = octavo_engine({"observers": ["otel_spans"]}, [("observer", PROVIDERS[0])])
    exported.clear()
    generate(engine, make_requests(3))
    spans = exported.get_finished_spans()
    requests = [span for span in spans if span.name == "request"]
    assert len(requests) == 3
    for span in requests:
        assert span.attributes["gen_ai.usage.output_tokens"] == 10
        assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
        phases = [s for s in spans if s.parent and s.parent.span_id == span.context.span_id]
        assert [phase.name for phase in phases] == ["queued", "prefill", "decode"]
        assert phases[0].start_time == span.start_time
        assert phases[-1].end_time == span.end_time
        assert all(a.end_time == b.start_time for a, b in zip(phases, phases[1:]))


def test_an_endpoint_without_its_package_is_refused(octavo_engine):
    pytest.importorskip("opentelemetry.sdk")
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401
    except ImportError:
        config = {"observers": [{"name": "otel_spans", "endpoint": "http://127.0.0.1:9/v1/traces"}]}
        with pytest.raises(ConfigError, match="opentelemetry-exporter-otlp-proto-http"):
            octavo_engine(config, [("observer", PROVIDERS[0])])
