"""What a caller gets back: `RequestOutput`, one a request, with a `CompletionOutput` a choice.

Names and shape are vLLM's, so that code written for it reads Octavo's results unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Logprob:
    """How probable a token was."""

    logprob: float
    """Natural logarithm of the raw probability (before penalties and temperature)."""
    rank: int | None = None
    """From 1, the most probable token."""
    decoded_token: str | None = None
    """The token's text by itself."""


SampleLogprobs = list[dict[int, Logprob]]
"""One dict a generated token: the sampled token first, then the alternatives by rank."""

PromptLogprobs = list[dict[int, Logprob] | None]
"""One dict a prompt token; None for the first, which nothing precedes."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. In a delta, text, token_ids and logprobs hold only what is new."""

    index: int
    """Which of the request's n choices, from 0."""
    text: str
    """Without the stop string or end token that ended it, unless include_stop_str_in_output."""
    token_ids: list[int]
    """Every generated token, an ending one included."""
    cumulative_logprob: float | None = None
    """Sum over the sampled tokens so far, when logprobs were asked for."""
    logprobs: SampleLogprobs | None = None
    """One dict a token of `token_ids`, when asked for."""
    finish_reason: str | None = None
    """None while it runs, then `stop`, `length`, `abort` or `error`."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for an end token."""

    def finished(self) -> bool:
        """Whether this choice has ended."""
        return self.finish_reason is not None

    def extend(self, later: CompletionOutput) -> None:
        """Append a later delta of the same choice to this one, in place."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs += later.logprobs
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason


@dataclass(slots=True)
class RequestMetrics:
    """Times are seconds of the clock that `time.time` reads, None until then."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0
    """Of all choices together."""
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's choices so far, or (in a delta) those that have something new."""

    request_id: str
    prompt: str | None
    """The text; None when token ids were given."""
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    """When asked for; in deltas only with the first."""
    outputs: list[CompletionOutput]
    finished: bool
    """Whether all choices have ended."""
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache; None before the request was first scheduled."""
    error: str | None = None
    """Why the request failed, when a choice has finish_reason `error`."""
    error_param: str | None = None
    error_code: str | None = None
    """As in `RequestError`; `internal_error` when the request is not to blame."""
    timeline: list[dict[str, Any]] | None = None
    """Events by time, of a finished request that asked for them (`SamplingParams.timeline`); see
    docs/timelines.md."""

    def extend(self, later: RequestOutput) -> None:
        """Merge a later delta of the same request into this one, in place."""
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
