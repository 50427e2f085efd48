"""The progress bar of `LLM.generate`."""

from __future__ import annotations

from typing import Self

from octavo.frontend.outputs import RequestOutput


class Progress:
    """A tqdm bar over requests, with tokens a second in and out."""

    def __init__(self, total: int, *, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=total, desc="Processed prompts", disable=not shown, dynamic_ncols=True
        )
        self._tokens = [0, 0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, output: RequestOutput) -> None:
        """Count a finished request."""
        self._tokens[0] += len(output.prompt_token_ids or ())
        self._tokens[1] += sum(len(choice.token_ids) for choice in output.outputs)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        rates = [tokens / elapsed for tokens in self._tokens]
        self._bar.set_postfix_str(
            f"in {rates[0]:.1f} tokens/s, out {rates[1]:.1f} tokens/s", refresh=False
        )
        self._bar.update(1)
