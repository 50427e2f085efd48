"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo.testing import RouteSuite

from octavo_perplexity import PROVIDERS


class TestPerplexity(RouteSuite):
    provider = PROVIDERS[0]
