"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_otel_spans.conformance import TestOtelSpans  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "otel_spans" in Registry.discover().providers("observer")
