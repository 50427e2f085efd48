"""The promises of the contract, as `octavo plugins check` and pytest run them."""

from __future__ import annotations

from octavo import SamplingParams
from octavo.testing import LogitsProcessorSuite

from octavo_no_repeat_ngram import PROVIDERS


class TestNoRepeatNgram(LogitsProcessorSuite):
    provider = PROVIDERS[0]
    params = (
        SamplingParams(extra_args={"no_repeat_ngram": 1}),
        SamplingParams(extra_args={"no_repeat_ngram": 2}),
        SamplingParams(extra_args={"no_repeat_ngram": 3}),
    )
    plain = SamplingParams()
