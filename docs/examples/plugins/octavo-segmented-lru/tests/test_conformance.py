"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_segmented_lru.conformance import TestSegmentedLru  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "segmented_lru" in Registry.discover().providers("eviction_policy")
