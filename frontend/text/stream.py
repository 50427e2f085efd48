"""The text of one sequence: detokenization and stop strings together."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.stops import StopScanner


class TextStream:
    """Takes the tokens of one sequence one by one and gives the text that may be shown.

    A stop string ends the sequence only with a token after the first `min_tokens`.
    """

    __slots__ = ("_count", "_detokenizer", "_hidden", "_min_tokens", "_scanner", "_table")

    def __init__(
        self, table: TokenTable, prompt_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        self._table = table
        shown = sampling.shown_special_token_ids or ()
        self._hidden = table.hidden_ids(sampling.skip_special_tokens, shown)
        self._min_tokens = sampling.min_tokens
        self._count = 0
        self._detokenizer = table.detokenizer(
            prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
            shown=shown,
        )
        self._scanner: StopScanner | None = None
        if sampling.stop:
            self._scanner = StopScanner(
                list(sampling.stop),
                include=sampling.include_stop_str_in_output,
                hidden_texts=[table.token_text(token) for token in self._hidden],
            )

    def feed(self, token_id: int) -> tuple[str, str | None]:
        """Text that this token releases, and the stop string that ends the sequence with it."""
        self._count += 1
        scanner = self._scanner
        if scanner is None:
            return self._detokenizer.feed(token_id), None
        armed = self._count > self._min_tokens
        if token_id in self._hidden:
            return scanner.feed_hidden(self._table.token_text(token_id), armed=armed)
        return scanner.feed(self._detokenizer.feed(token_id), armed=armed)

    def finish(self) -> str:
        """The text that was held back, when the sequence ended without a stop string."""
        rest = self._detokenizer.flush()
        if self._scanner is None:
            return rest
        return self._scanner.feed(rest, armed=False)[0] + self._scanner.flush()
