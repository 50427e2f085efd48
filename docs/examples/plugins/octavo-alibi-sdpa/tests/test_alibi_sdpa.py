"""ALiBi is computed, and is what the suite checked."""

from octavo.core.contracts import Platform
from octavo.testing.conformance.attention_backend import SPECS
from octavo_alibi_sdpa.attention_backend import AlibiSdpaAttention, slopes
from octavo_alibi_sdpa.conformance import TestAlibiSdpa as Suite


def test_the_suite_has_checked_alibi():
    assert AlibiSdpaAttention.supports(SPECS["ALiBi"], Platform()) is None
    assert "ALiBi" in [name for name, _, _ in Suite().specs()]


def test_slopes_of_the_paper():
    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    assert slopes(12)[8:] == [2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
