"""Conformance, and room for tests of what is special about this implementation."""

from octavo.core.registry import Registry
from octavo_no_repeat_ngram.conformance import TestNoRepeatNgram  # noqa: F401  (collected by pytest)


def test_it_is_registered():
    assert "no_repeat_ngram" in Registry.discover().providers("logits_processor")
