"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo.testing import EvictionPolicySuite

from octavo_segmented_lru import PROVIDERS


class TestSegmentedLru(EvictionPolicySuite):
    provider = PROVIDERS[0]
