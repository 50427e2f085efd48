"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo.testing import ObserverSuite

from octavo_otel_spans import PROVIDERS


class TestOtelSpans(ObserverSuite):
    provider = PROVIDERS[0]
