"""What this package offers to Octavo. Importing it imports no implementation."""

from __future__ import annotations

from typing import Any

from octavo import Provider, hookimpl

PROVIDERS: list[Provider[Any]] = [
    Provider(
        name="no_repeat_ngram",
        factory="octavo_no_repeat_ngram.logits_processor:NoRepeatNgramProcessor",
        options="octavo_no_repeat_ngram.logits_processor:NoRepeatNgramOptions",
        contract_version="1",
        rank=-1,  # only when named; give it a rank from 0 on to let `auto` choose it
        summary="no run of n tokens appears twice in an output",
    ),
]


@hookimpl
def octavo_logits_processors() -> list[Provider[Any]]:
    return PROVIDERS
