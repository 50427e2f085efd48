"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo.testing import SchedulerPolicySuite

from octavo_class_quotas import PROVIDERS


class TestClassQuotas(SchedulerPolicySuite):
    provider = PROVIDERS[0]
    options = {"classes": {0: {"weight": 3}, 2: {"weight": 0.5, "max_running": 2}}}
