"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from octavo.server.openai.generation import ChunkedGeneration
from octavo.server.openai.protocol.common import Usage
from octavo.server.openai.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from octavo.server.openai.state import ServerState
from octavo.server.openai.tokens import CompletionLogprobsWriter, TokenTexts, prompt_logprobs


class CompletionGeneration(ChunkedGeneration[CompletionRequest]):
    """Continues one prompt or several. Choices are numbered prompt * n + index."""

    request = CompletionRequest
    prefix = "cmpl-"

    def __init__(self, state: ServerState, body: CompletionRequest, **facts: Any) -> None:
        super().__init__(state, body, **facts)
        self._texts = TokenTexts(
            state.llm.tokenizer,
            as_ids=body.return_tokens_as_token_ids,
            hide_special=body.skip_special_tokens,
        )
        self._logprobs: dict[tuple[int, int], CompletionLogprobsWriter] = {}
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._begun: set[tuple[int, int]] = set()

    def sampling_params(self) -> SamplingParams:
        return self.body.sampling_params(self.state.defaults)

    async def given_prompts(self) -> list[str | list[int]]:
        return self.body.prompts

    @property
    def add_special_tokens(self) -> bool:
        return self.body.add_special_tokens

    def add_prompt(self, prompt: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(prompt, output.prompt_logprobs)

    def chunks(self, prompt: int, output: RequestOutput) -> list[CompletionResponse]:
        self.add_prompt(prompt, output)
        chunks = []
        for choice in output.outputs:
            key = (prompt, choice.index)
            first = key not in self._begun
            if (
                (first and self.body.echo)
                or choice.text
                or self.has_more(choice)
                or self.body.return_token_ids
            ):
                self._begun.add(key)
                chunks.append(self._response([self._choice(key, choice, first)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        response = self._response([])
        response.usage = usage
        return response

    def answer(self, choices: Mapping[tuple[int, int], CompletionOutput]) -> CompletionResponse:
        written = []
        for key, choice in choices.items():
            item = self._choice(key, choice, True)
            if self.body.prompt_logprobs is not None:
                entries = self._prompt_logprobs.get(key[0], ())
                item.prompt_logprobs = prompt_logprobs(entries, self.state.llm.tokenizer)
            written.append(item)
        response = self._response(written)
        response.usage = self.usage()
        return response

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return CompletionResponse(
            id=self.answer_id,
            object="text_completion",
            created=self.created,
            model=self.model,
            choices=choices,
        )

    def _choice(
        self, key: tuple[int, int], choice: CompletionOutput, first: bool
    ) -> CompletionChoice:
        prompt, index = key
        echo = first and self.body.echo
        item = CompletionChoice(
            index=prompt * self.body.num_choices + index,
            text=self._prompt_text(prompt) + choice.text if echo else choice.text,
            logprobs=self._write_logprobs(key, choice, echo),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self.body.return_token_ids:
            item.token_ids = list(choice.token_ids)
            if first:
                item.prompt_token_ids = self.prompts[prompt].token_ids
        return item

    def _prompt_text(self, prompt: int) -> str:
        prepared = self.prompts[prompt]
        if prepared.prompt is not None:
            return prepared.prompt
        return self.state.llm.tokenizer.decode(
            prepared.token_ids, skip_special_tokens=self.body.skip_special_tokens
        )

    def _write_logprobs(
        self, key: tuple[int, int], choice: CompletionOutput, echo: bool
    ) -> CompletionLogprobs | None:
        count = self.body.logprobs
        if count is None:
            return None
        if key not in self._logprobs:
            self._logprobs[key] = CompletionLogprobsWriter(count, self._texts)
        token_ids: list[int] = list(choice.token_ids)
        entries: list[Any] = list(choice.logprobs or ())
        if echo:
            token_ids = self.prompts[key[0]].token_ids + token_ids
            entries = [*self._prompt_logprobs.get(key[0], ()), *entries]
        return self._logprobs[key].write(token_ids, entries)
