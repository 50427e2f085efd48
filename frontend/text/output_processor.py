"""`OutputProcessor`: what the engine sends, as what callers read.

Shared by `LLM`, `AsyncLLM` and the server. It owns the text of every live request, finds stop
strings, and aborts sequences in the engine when their text has ended. Single-threaded: all calls
come from the thread (or event loop) that reads the engine's outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from octavo.core.messages import EngineOutputs, Finish, Logprobs
from octavo.frontend.outputs import (
    CompletionOutput,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
)
from octavo.frontend.text.detokenizer import TextStream, TokenTable
from octavo.frontend.text.inputs import PreparedRequest

OutputMode = Literal["delta", "cumulative", "final"]
"""What a request's updates hold: what is new, all so far, or nothing before the end."""


class OutputProcessor:
    """Turns the outputs of a step into one `RequestOutput` for each request that they concern.

    table: the tokenizer's tokens. abort: called with the handles of sequences that the engine must
    end, and the reason: `stop` where their text came to a stop string, else `abort`.
    """

    def __init__(
        self,
        table: TokenTable,
        abort: Callable[[Sequence[int], str], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table = table
        self._abort_in_engine = abort
        self._clock = clock
        self._choices: dict[int, _Choice] = {}  # by engine handle
        self._requests: dict[str, _Request] = {}
        self._queued: dict[str, int] = {}  # prompt tokens of requests that the engine has not begun

    @property
    def num_queued(self) -> int:
        """Requests that wait for the engine."""
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of the requests that wait for the engine."""
        return sum(self._queued.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Live requests, in order of arrival."""
        return list(self._requests)

    def add(self, prepared: PreparedRequest, mode: OutputMode = "final") -> None:
        """Expect outputs for this request. Its request_id must not be live already."""
        assert prepared.request_id not in self._requests, "request_id is live already"
        request = _Request(prepared, self._table, mode, self._clock())
        self._requests[prepared.request_id] = request
        self._queued[prepared.request_id] = len(prepared.token_ids)
        for choice in request.choices:
            self._choices[choice.handle] = choice

    def abort(self, request_id: str) -> RequestOutput | None:
        """Forget a request and end in the engine what still runs of it. Returns its last output,
        whose unfinished choices have finish_reason `abort`; None for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        running = [choice for choice in request.choices if choice.finish_reason is None]
        for choice in running:
            choice.finish("abort", None)
        self._abort_in_engine([choice.handle for choice in running], "abort")
        return self._update(request, self._clock())

    def process(self, outputs: EngineOutputs) -> list[RequestOutput]:
        """Take one step's outputs. Handles that are not live (any more) are ignored."""
        touched: dict[str, _Request] = {}
        stopped: list[int] = []
        ends = {finish.handle: finish for finish in outputs.finished}
        for handle, count in outputs.cached.items():
            if (choice := self._choices.get(handle)) is not None and choice.index == 0:
                choice.request.num_cached_tokens = count
                self._queued.pop(choice.request.prepared.request_id, None)
        for part in outputs.prompt_logprobs:
            if (choice := self._choices.get(part.handle)) is not None:
                known = choice.request.prompt_logprobs
                if known is not None:
                    later = _position_dicts(part.logprobs, self._table)
                    _place_prompt_logprobs(known, part.start, later)
        for choice, tokens, logprobs in self._rows(outputs):
            end = ends.get(choice.handle)
            choice.append(tokens, logprobs, end is not None and end.reason == "stop")
            touched[choice.request.prepared.request_id] = choice.request
            if choice.finish_reason is not None and end is None:
                stopped.append(choice.handle)
        for end in outputs.finished:
            if (choice := self._choices.get(end.handle)) is not None:
                touched[choice.request.prepared.request_id] = choice.request
                self._end(choice, end)
        if stopped:
            self._abort_in_engine(stopped, "stop")
        now = self._clock()
        updates = (self._update(request, now) for request in touched.values())
        return [update for update in updates if update is not None]

    def _rows(self, outputs: EngineOutputs) -> Iterator[tuple[_Choice, list[int], SampleLogprobs]]:
        """The live sequences that got tokens, with one dict a token where logprobs came."""
        handles = outputs.handles.tolist()
        rows = outputs.token_ids.tolist()
        counts = None if outputs.counts is None else outputs.counts.tolist()
        dicts: dict[int, SampleLogprobs] = {}
        if outputs.logprobs is not None:
            found = _position_dicts(outputs.logprobs, self._table)
            for row, position in zip(outputs.logprobs.rows.tolist(), found, strict=True):
                dicts.setdefault(row, []).append(position)
        for row, handle in enumerate(handles):
            choice = self._choices.get(handle)
            if choice is None or choice.finish_reason is not None:
                continue
            tokens = rows[row] if counts is None else rows[row][: counts[row]]
            yield choice, tokens, dicts.get(row, [])

    def _end(self, choice: _Choice, end: Finish) -> None:
        """The engine ended a sequence. An error of one choice ends the whole request."""
        request = choice.request
        request.metrics.num_preemptions += end.num_preemptions
        if end.reason != "error" or choice.finish_reason is not None:
            choice.finish(end.reason, end.stop_token)
            return
        request.error = end
        running = [each for each in request.choices if each.finish_reason is None]
        for each in running:
            each.finish("error", None)
        self._abort_in_engine([each.handle for each in running if each is not choice], "abort")

    def _update(self, request: _Request, now: float) -> RequestOutput | None:
        """The output to hand over, if there is one. What has ended is forgotten."""
        for choice in request.choices:
            if choice.finish_reason is not None:
                self._choices.pop(choice.handle, None)
        finished = all(choice.finish_reason is not None for choice in request.choices)
        if finished:
            self._requests.pop(request.prepared.request_id, None)
            self._queued.pop(request.prepared.request_id, None)
        return request.output(finished, now)


class _Request:
    """A live request: its choices and what they share."""

    __slots__ = (
        "_sent_prompt",
        "choices",
        "error",
        "metrics",
        "mode",
        "num_cached_tokens",
        "prepared",
        "prompt_logprobs",
    )

    def __init__(
        self, prepared: PreparedRequest, table: TokenTable, mode: OutputMode, now: float
    ) -> None:
        self.prepared = prepared
        self.mode = mode
        self.choices = [_Choice(self, each.handle, each.index, table) for each in prepared.requests]
        self.num_cached_tokens: int | None = None
        self.error: Finish | None = None
        self.metrics = RequestMetrics(arrival_time=now)
        wants_prompt = prepared.sampling.prompt_logprobs is not None
        self.prompt_logprobs: PromptLogprobs | None = [None] if wants_prompt else None
        self._sent_prompt = False

    def output(self, finished: bool, now: float) -> RequestOutput | None:
        """What callers see after a step, by mode; None: nothing."""
        metrics, error = self.metrics, self.error
        metrics.num_generation_tokens = sum(choice.num_tokens for choice in self.choices)
        if metrics.num_generation_tokens:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        if finished:
            metrics.finished_time = now
        prompt_logprobs = self.prompt_logprobs
        if self.mode == "delta":
            outputs = [choice.delta() for choice in self.choices if choice.has_news]
            if not outputs:
                return None
            if self._sent_prompt:
                prompt_logprobs = None
            self._sent_prompt = True
        elif self.mode == "cumulative" or finished:
            outputs = [choice.snapshot() for choice in self.choices]
        else:
            return None
        output = RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=finished,
            metrics=metrics,
            num_cached_tokens=self.num_cached_tokens,
        )
        if error is not None:
            output.error = error.error or "the engine gave no reason"
            output.error_param, output.error_code = error.param, error.code
        return output


class _Choice:
    """A live sequence: its tokens and its text, all of them or (for deltas) those that were not
    handed over yet."""

    __slots__ = (
        "_cumulative_logprob",
        "_hidden",
        "_include_stop",
        "_logprobs",
        "_stream",
        "_text",
        "_token_ids",
        "finish_reason",
        "handle",
        "has_news",
        "index",
        "num_tokens",
        "request",
        "stop_reason",
    )

    def __init__(self, request: _Request, handle: int, index: int, table: TokenTable) -> None:
        prepared, sampling = request.prepared, request.prepared.sampling
        self.request = request
        self.handle = handle
        self.index = index
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.has_news = False
        """Whether there is something for `delta` to tell."""
        self._stream = (
            TextStream(table, prepared.token_ids, sampling) if sampling.detokenize else None
        )
        self._include_stop = sampling.include_stop_str_in_output
        self._hidden = sampling.max_tokens == 0  # the engine generates one token all the same
        self._logprobs: SampleLogprobs | None = None if sampling.logprobs is None else []
        self._cumulative_logprob: float | None = None if sampling.logprobs is None else 0.0
        self._text: list[str] = []
        self._token_ids: list[int] = []

    def append(self, tokens: list[int], logprobs: SampleLogprobs, ends_with_token: bool) -> None:
        """Take new tokens, the last of which ended the sequence if `ends_with_token`. After a stop
        string the rest is dropped."""
        if self._hidden:
            return
        silent = len(tokens) - 1 if ends_with_token and not self._include_stop else len(tokens)
        for place, token in enumerate(tokens):
            self.has_news = True
            self.num_tokens += 1
            self._token_ids.append(token)
            if self._logprobs is not None:
                position = logprobs[place] if place < len(logprobs) else {}
                self._logprobs.append(position)
                if token in position:
                    assert self._cumulative_logprob is not None, "it goes with logprobs"
                    self._cumulative_logprob += position[token].logprob
            if self._stream is None or place >= silent:
                continue
            text, stop = self._stream.feed(token)
            if text:
                self._text.append(text)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """End the sequence; one that has ended stays as it is."""
        if self.finish_reason is not None:
            return
        if self._hidden and reason == "stop":
            reason, stop_reason = "length", None
        self.has_news = True
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None and (rest := self._stream.finish()):
            self._text.append(rest)

    def delta(self) -> CompletionOutput:
        """What is new since the last delta; it is the reader's from now on."""
        output = self._output("".join(self._text), self._token_ids, self._logprobs)
        self._text, self._token_ids = [], []
        if self._logprobs is not None:
            self._logprobs = []
        self.has_news = False
        return output

    def snapshot(self) -> CompletionOutput:
        """All so far, copied: the reader may keep it."""
        text = "".join(self._text)
        self._text = [text]
        logprobs = None if self._logprobs is None else self._logprobs.copy()
        return self._output(text, self._token_ids.copy(), logprobs)

    def _output(
        self, text: str, token_ids: list[int], logprobs: SampleLogprobs | None
    ) -> CompletionOutput:
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self._cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
        )


def _position_dicts(columns: Logprobs, table: TokenTable | None) -> SampleLogprobs:
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


def _place_prompt_logprobs(known: PromptLogprobs, start: int, later: SampleLogprobs) -> None:
    """Put the dicts of prompt tokens `start` and later into `known`, which grows as needed.

    Prompts are computed in chunks, and again after a preemption: what came before is replaced.
    """
    end = start + len(later)
    known.extend([None] * (end - len(known)))
    known[start:end] = later
