"""`POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.server.http.endpoint import DataEvents, has_more
from octavo.server.http.state import ServerState
from octavo.server.openai.generation import GivenPrompt, GivenText, Job
from octavo.server.openai.protocol.common import Usage
from octavo.server.openai.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from octavo.server.openai.tokens import CompletionLogprobsWriter, TokenTexts, prompt_logprobs
from octavo.server.process.engine import Choice, Output, TokenLogprob

PromptEntries = Sequence[Mapping[int, TokenLogprob] | None]


class Completions:
    """The endpoint."""

    request = CompletionRequest
    prefix = "cmpl-"

    def params(self, state: ServerState, body: CompletionRequest) -> SamplingParams:
        return body.sampling_params(state.defaults, state.llm.inputs.vocab_size)

    async def prompts(self, state: ServerState, body: CompletionRequest) -> list[GivenPrompt]:
        special = body.add_special_tokens
        return [
            GivenText(given, special) if isinstance(given, str) else given for given in body.prompts
        ]

    def writer(self, state: ServerState, job: Job) -> CompletionWriter:
        return CompletionWriter(state, job)


class CompletionWriter(DataEvents):
    """Writes choices numbered prompt * n + index."""

    def __init__(self, state: ServerState, job: Job) -> None:
        assert isinstance(job.body, CompletionRequest), "a completion job"
        super().__init__(job)
        self._state, self._body = state, job.body
        self._texts = TokenTexts(
            state.llm.tokenizer,
            as_ids=job.body.return_tokens_as_token_ids,
            hide_special=job.body.skip_special_tokens,
        )
        self._logprobs: dict[tuple[int, int], CompletionLogprobsWriter] = {}
        self._prompt_entries: dict[int, PromptEntries] = {}
        self._begun: set[tuple[int, int]] = set()

    def add_prompt(self, prompt: int, output: Output) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_entries.setdefault(prompt, output.prompt_logprobs)

    def chunks(self, prompt: int, output: Output) -> list[CompletionResponse]:
        self.add_prompt(prompt, output)
        chunks = []
        for choice in output.outputs:
            key = (prompt, choice.index)
            first = key not in self._begun
            if (
                (first and self._body.echo)
                or choice.text
                or has_more(choice)
                or self._body.return_token_ids
            ):
                self._begun.add(key)
                chunks.append(self._response([self._choice(key, choice, first)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        response = self._response([])
        response.usage = usage
        return response

    def answer(self, choices: Mapping[tuple[int, int], Choice], usage: Usage) -> CompletionResponse:
        written = []
        for key, choice in choices.items():
            item = self._choice(key, choice, True)
            if self._body.prompt_logprobs is not None:
                entries = self._prompt_entries.get(key[0], ())
                item.prompt_logprobs = prompt_logprobs(entries, self._state.llm.tokenizer)
            written.append(item)
        response = self._response(written)
        response.usage = usage
        return response

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        job = self._job
        return CompletionResponse(
            id=job.answer_id,
            object="text_completion",
            created=job.created,
            model=job.model,
            choices=choices,
        )

    def _choice(self, key: tuple[int, int], choice: Choice, first: bool) -> CompletionChoice:
        prompt, index = key
        echo = first and self._body.echo
        item = CompletionChoice(
            index=prompt * self._body.num_choices + index,
            text=self._prompt_text(prompt) + choice.text if echo else choice.text,
            logprobs=self._write_logprobs(key, choice, echo),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            item.token_ids = list(choice.token_ids)
            if first:
                item.prompt_token_ids = self._job.prompts[prompt].token_ids
        return item

    def _prompt_text(self, prompt: int) -> str:
        given = self._job.prompts[prompt]
        if given.text is not None:
            return given.text
        tokenizer = self._state.llm.tokenizer
        return tokenizer.decode(given.token_ids, skip_special_tokens=self._body.skip_special_tokens)

    def _write_logprobs(
        self, key: tuple[int, int], choice: Choice, echo: bool
    ) -> CompletionLogprobs | None:
        count = self._body.logprobs
        if count is None:
            return None
        if key not in self._logprobs:
            self._logprobs[key] = CompletionLogprobsWriter(count, self._texts)
        token_ids: list[int] = list(choice.token_ids)
        entries: list[Any] = list(choice.logprobs or ())
        if echo:
            token_ids = self._job.prompts[key[0]].token_ids + token_ids
            entries = [*self._prompt_entries.get(key[0], ()), *entries]
        return self._logprobs[key].write(token_ids, entries)
