"""What the output processor remembers of a live request."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from octavo.core.messages import Logprobs
from octavo.frontend.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import PreparedRequest
from octavo.frontend.text.logprobs import place_prompt_logprobs, position_dicts
from octavo.frontend.text.stream import TextStream

OutputMode = Literal["delta", "cumulative", "final"]
"""What a request's updates hold: what is new, all so far, or nothing before the end."""


class RequestState:
    """One caller's request: its choices and what they share."""

    __slots__ = (
        "_sent_prompt",
        "_table",
        "choices",
        "error",
        "error_code",
        "error_param",
        "metrics",
        "mode",
        "num_cached_tokens",
        "prepared",
        "prompt_logprobs",
        "request_id",
    )

    def __init__(
        self, prepared: PreparedRequest, table: TokenTable, mode: OutputMode, now: float
    ) -> None:
        self.request_id = prepared.request_id
        self.prepared = prepared
        self.mode = mode
        self.choices = [
            ChoiceState(self, each.handle, each.index, table) for each in prepared.requests
        ]
        self.num_cached_tokens: int | None = None
        self.error: str | None = None
        self.error_param: str | None = None
        self.error_code: str | None = None
        self.metrics = RequestMetrics(arrival_time=now)
        wants_prompt = prepared.sampling.prompt_logprobs is not None
        self.prompt_logprobs: PromptLogprobs | None = [None] if wants_prompt else None
        self._sent_prompt = False
        self._table = table

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.choices)

    def add_prompt_logprobs(self, start: int, columns: Logprobs) -> None:
        if self.prompt_logprobs is not None:
            place_prompt_logprobs(self.prompt_logprobs, start, position_dicts(columns, self._table))

    def update(self, now: float) -> RequestOutput | None:
        """What callers see after a step: depends on the mode."""
        finished = self.finished
        metrics = self.metrics
        metrics.num_generation_tokens = sum(len(choice.token_ids) for choice in self.choices)
        if metrics.num_generation_tokens:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if finished:
            metrics.finished_time = now
        prompt_logprobs = self.prompt_logprobs
        if self.mode == "delta":
            outputs = [choice.delta() for choice in self.choices if choice.has_news()]
            if not outputs:
                return None
            if self._sent_prompt:
                prompt_logprobs = None
            self._sent_prompt = True
        elif self.mode == "cumulative" or finished:
            outputs = [choice.snapshot() for choice in self.choices]
        else:
            return None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=metrics,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
            error_param=self.error_param,
            error_code=self.error_code,
        )


class ChoiceState:
    """One sequence: its tokens, its text in pieces, and how much of both was handed over."""

    __slots__ = (
        "_at_token",
        "_cumulative",
        "_keep",
        "_limit",
        "_logprobs",
        "_pieces",
        "_sent_end",
        "_stream",
        "_text",
        "finish_reason",
        "handle",
        "index",
        "request",
        "stop_reason",
        "token_ids",
    )

    def __init__(self, request: RequestState, handle: int, index: int, table: TokenTable) -> None:
        sampling = request.prepared.sampling
        self.request = request
        self.handle = handle
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        wants_text = sampling.detokenize
        self._stream = (
            TextStream(table, request.prepared.token_ids, sampling) if wants_text else None
        )
        self._keep = sampling.include_stop_str_in_output
        self._limit = 0 if sampling.max_tokens == 0 else None
        self._logprobs: SampleLogprobs | None = None if sampling.logprobs is None else []
        self._cumulative = 0.0
        self._text: list[str] = []
        self._pieces = 0  # pieces of _text, tokens and the end that delta() handed over
        self._at_token = 0
        self._sent_end = False

    def append(self, tokens: list[int], logprobs: SampleLogprobs, ends_with_token: bool) -> None:
        """Take new tokens, the last of which ended the sequence if `ends_with_token`. After a stop
        string the rest is dropped."""
        if self._limit is not None:
            return
        silent = len(tokens) - 1 if ends_with_token and not self._keep else len(tokens)
        for place, token in enumerate(tokens):
            self.token_ids.append(token)
            if self._logprobs is not None:
                self._add_logprobs(token, logprobs[place] if place < len(logprobs) else {})
            if self._stream is None or place >= silent:
                continue
            text, stop = self._stream.feed(token)
            if text:
                self._text.append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return

    def _add_logprobs(self, token: int, position: dict[int, Logprob]) -> None:
        assert self._logprobs is not None
        self._logprobs.append(position)
        if token in position:
            self._cumulative += position[token].logprob

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """End the sequence; one that has ended stays as it is."""
        if self.finish_reason is not None:
            return
        if self._limit is not None and reason == "stop":
            reason, stop_reason = "length", None
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None and (rest := self._stream.finish()):
            self._text.append(rest)

    def has_news(self) -> bool:
        """Whether `delta` has something to tell."""
        ended = self.finish_reason is not None and not self._sent_end
        return ended or len(self.token_ids) > self._at_token or len(self._text) > self._pieces

    def delta(self) -> CompletionOutput:
        """What is new since the last delta."""
        start = self._at_token
        output = CompletionOutput(
            self.index,
            "".join(self._text[self._pieces :]),
            self.token_ids[start:],
            None if self._logprobs is None else self._cumulative,
            None if self._logprobs is None else self._logprobs[start:],
            self.finish_reason,
            self.stop_reason,
        )
        self._pieces, self._at_token = len(self._text), len(self.token_ids)
        self._sent_end = self.finish_reason is not None
        return output

    def snapshot(self) -> CompletionOutput:
        """All so far. Lists are joined or copied when they are looked at: a step costs the same
        however long the sequence is."""
        return _Snapshot(self)

    def parts(self) -> tuple[list[str], list[int], SampleLogprobs | None]:
        """The growing lists, for a snapshot that remembers how long they were."""
        return self._text, self.token_ids, self._logprobs

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self._logprobs is None else self._cumulative


class _Snapshot(CompletionOutput):
    """A `CompletionOutput` whose text, token_ids and logprobs are made when first read."""

    __slots__ = ("_ends", "_parts")

    def __init__(self, choice: ChoiceState) -> None:
        self.index = choice.index
        self.cumulative_logprob = choice.cumulative_logprob
        self.finish_reason = choice.finish_reason
        self.stop_reason = choice.stop_reason
        self._parts = choice.parts()
        self._ends = (len(self._parts[0]), len(self._parts[1]))

    def __reduce__(self) -> tuple[type[CompletionOutput], tuple[object, ...]]:
        """Copied and pickled as what it stands for."""
        names = [each.name for each in fields(CompletionOutput)]
        return CompletionOutput, tuple(getattr(self, name) for name in names)

    def __getattr__(self, name: str) -> object:
        # Reached only while the slot of that name is empty.
        pieces, tokens, logprobs = self._parts
        value: object
        if name == "text":
            value = self.text = "".join(pieces[: self._ends[0]])
        elif name == "token_ids":
            value = self.token_ids = tokens[: self._ends[1]]
        elif name == "logprobs":
            value = self.logprobs = None if logprobs is None else logprobs[: self._ends[1]]
        else:
            raise AttributeError(f"'CompletionOutput' object has no attribute '{name}'")
        return value


_Snapshot.__qualname__ = "CompletionOutput"  # what callers see of it
