"""Columns of log probabilities to the dicts that callers read."""

from __future__ import annotations

from octavo.core.messages import Logprobs
from octavo.frontend.outputs import Logprob, PromptLogprobs, SampleLogprobs
from octavo.frontend.text.detokenizer import TokenTable


def position_dicts(columns: Logprobs, table: TokenTable | None) -> SampleLogprobs:
    """One dict for each of the m positions of `columns`: the chosen token first, then as many of
    the most probable as the row asked for (the chosen one among them is not repeated).

    table: for `decoded_token`; None leaves it None.
    """
    rows = zip(
        columns.token_ids.tolist(),
        columns.values.tolist(),
        columns.ranks.tolist(),
        columns.num.tolist(),
        strict=True,
    )
    return [_position(*row, table) for row in rows]


def _position(
    tokens: list[int], values: list[float], rank: int, num: int, table: TokenTable | None
) -> dict[int, Logprob]:
    found: dict[int, Logprob] = {}
    for place, token in enumerate(tokens[: 1 + num]):
        if token not in found:
            text = None if table is None else table.token_text(token)
            found[token] = Logprob(values[place], rank if place == 0 else place, text)
    return found


def place_prompt_logprobs(known: PromptLogprobs, start: int, later: SampleLogprobs) -> None:
    """Put the dicts of prompt tokens `start` and later into `known`, which grows as needed.

    Prompts are computed in chunks, and again after a preemption: what came before is replaced.
    """
    end = start + len(later)
    known.extend([None] * (end - len(known)))
    known[start:end] = later
