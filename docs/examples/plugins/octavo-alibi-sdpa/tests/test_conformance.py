"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_alibi_sdpa.conformance import TestAlibiSdpa  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "alibi_sdpa" in Registry.discover().providers("attention_backend")
