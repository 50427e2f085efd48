"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo.testing import AttentionBackendSuite

from octavo_alibi_sdpa import PROVIDERS


class TestAlibiSdpa(AttentionBackendSuite):
    provider = PROVIDERS[0]
