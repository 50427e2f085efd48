"""What a caller gets back: `RequestOutput`, one a request, with a `CompletionOutput` a choice.

Names and shape are vLLM's, so that code written for it reads Octavo's results unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Logprob:
    """Natural logarithm of a token's raw probability; its rank, from 1; its text alone."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


SampleLogprobs = list[dict[int, Logprob]]
"""One dict a generated token: the sampled token first, then the alternatives by rank."""

PromptLogprobs = list[dict[int, Logprob] | None]
"""One dict a prompt token; None for the first, which nothing precedes."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    text: without the stop string or end token that ended it, unless include_stop_str_in_output.
    token_ids: every generated token, an ending one included. cumulative_logprob: sum over the
    sampled tokens so far, when logprobs were asked for. logprobs: one dict a token of `token_ids`.
    finish_reason: None while it runs, then `stop`, `length`, `abort` or `error`. stop_reason: the
    stop string, or the stop token id; None for an end token. Of a delta, text, token_ids and
    logprobs hold only what is new.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None

    def extend(self, later: CompletionOutput) -> None:
        """Append a later delta of the same choice to this one."""
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds of the clock that `time.time` reads; None where it has not come to that."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's choices so far, all of them or (in a delta) those that have something new.

    prompt: the text, None when token ids were given. prompt_logprobs: when asked for; in deltas
    only with the first. finished: no choice runs any more. num_cached_tokens: prompt tokens found
    in the prefix cache, None before the request was first scheduled. error: why the request failed,
    when a choice has finish_reason `error`; error_param, error_code: as in `RequestError`
    (`internal_error`: not the request's doing).
    timeline: events by time, of the finished request and when asked for
    (`SamplingParams.timeline`); see docs/timelines.md.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    error: str | None = None
    error_param: str | None = None
    error_code: str | None = None
    timeline: list[dict[str, Any]] | None = None

    def extend(self, later: RequestOutput) -> None:
        """Merge a later delta of the same request into this one."""
        mine = {output.index: output for output in self.outputs}
        for output in later.outputs:
            if output.index in mine:
                mine[output.index].extend(output)
            else:
                self.outputs.append(output)
        self.outputs.sort(key=lambda output: output.index)
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finished = later.finished
        self.metrics = later.metrics
        self.num_cached_tokens = later.num_cached_tokens
        self.error = later.error
        self.error_param, self.error_code = later.error_param, later.error_code
        self.timeline = later.timeline
