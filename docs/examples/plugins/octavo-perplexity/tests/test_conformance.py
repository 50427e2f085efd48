"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_perplexity.conformance import TestPerplexity  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "perplexity" in Registry.discover().providers("route")
