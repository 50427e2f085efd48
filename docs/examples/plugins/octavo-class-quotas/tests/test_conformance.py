"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_class_quotas.conformance import TestClassQuotas  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "class_quotas" in Registry.discover().providers("scheduler_policy")
