"""Built-in logits processors. Importing this imports no implementation.

A positive rank makes each of them run unless it is disabled; the ranks are their order, so that no
bias lifts what a mask forbids.
"""

from __future__ import annotations

from typing import Any

from octavo.core.contracts import Provider

_PACKAGE = "octavo.plugins.logits_processors"

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="bias",
        factory=f"{_PACKAGE}.bias:BiasProcessor",
        rank=50,
        summary="logit_bias: adds to the logits of given tokens.",
    ),
    Provider(
        name="allowed_tokens",
        factory=f"{_PACKAGE}.allowed_tokens:AllowedTokensProcessor",
        rank=40,
        summary="allowed_token_ids: nothing else may be sampled.",
    ),
    Provider(
        name="penalties",
        factory=f"{_PACKAGE}.penalties:PenaltiesProcessor",
        rank=30,
        summary="Repetition, frequency and presence penalties.",
    ),
    Provider(
        name="bad_words",
        factory=f"{_PACKAGE}.bad_words:BadWordsProcessor",
        rank=20,
        summary="bad_words: token sequences that may not appear in the output.",
    ),
    Provider(
        name="min_tokens",
        factory=f"{_PACKAGE}.min_tokens:MinTokensProcessor",
        rank=10,
        summary="min_tokens: no end or stop token before so many tokens.",
    ),
]
