"""`OutputProcessor`: what the engine sends, as what callers read.

Shared by `LLM`, `AsyncLLM` and the server. It owns the text of every live request, finds stop
strings, and says which sequences the engine must abort because their text has ended.
Single-threaded: all calls from the thread (or event loop) that reads the engine's outputs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from octavo.core.messages import EngineOutputs, Finish
from octavo.frontend.outputs import RequestOutput, SampleLogprobs
from octavo.frontend.text.detokenizer import TokenTable
from octavo.frontend.text.inputs import PreparedRequest
from octavo.frontend.text.logprobs import position_dicts
from octavo.frontend.text.state import ChoiceState, OutputMode, RequestState


@dataclass(slots=True)
class ProcessedOutputs:
    """updates: one an affected request. stops, aborts: handles of sequences that the engine should
    end, because their text came to a stop string, and for other reasons."""

    updates: list[RequestOutput] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)


class OutputProcessor:
    """Keeps a `TextStream` and the tokens of every live sequence, by engine handle."""

    def __init__(self, table: TokenTable, *, clock: Callable[[], float] = time.time) -> None:
        self._table = table
        self._clock = clock
        self._choices: dict[int, ChoiceState] = {}
        self._requests: dict[str, RequestState] = {}
        self._queued: dict[str, int] = {}  # prompt tokens of requests that the engine has not begun

    @property
    def num_queued(self) -> int:
        """Requests that wait for the engine."""
        return len(self._queued)

    @property
    def num_queued_tokens(self) -> int:
        """Their prompt tokens."""
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
        request = RequestState(prepared, self._table, mode, self._clock())
        self._requests[prepared.request_id] = request
        self._queued[prepared.request_id] = len(prepared.token_ids)
        for choice in request.choices:
            self._choices[choice.handle] = choice

    def abort(self, request_id: str) -> tuple[list[int], RequestOutput | None]:
        """Forget a request. Returns the handles that the engine still runs, and the request's last
        output, whose unfinished choices have finish_reason `abort`; nothing for an unknown id."""
        request = self._requests.get(request_id)
        if request is None:
            return [], None
        handles = [choice.handle for choice in request.choices if choice.finish_reason is None]
        for choice in request.choices:
            choice.finish("abort", None)
        return handles, self._update(request, self._clock())

    def process(self, outputs: EngineOutputs) -> ProcessedOutputs:
        """Take one step's outputs. Handles that are not live (any more) are passed over."""
        result = ProcessedOutputs()
        touched: dict[str, RequestState] = {}
        ends = {finish.handle: finish for finish in outputs.finished}
        for handle, count in outputs.cached.items():
            if (choice := self._choices.get(handle)) is not None and choice.index == 0:
                choice.request.num_cached_tokens = count
                self._queued.pop(choice.request.request_id, None)
        for part in outputs.prompt_logprobs:
            if (choice := self._choices.get(part.handle)) is not None:
                choice.request.add_prompt_logprobs(part.start, part.logprobs)
        for choice, tokens, logprobs in self._rows(outputs):
            end = ends.get(choice.handle)
            choice.append(
                tokens, logprobs, ends_with_token=end is not None and end.reason == "stop"
            )
            touched[choice.request.request_id] = choice.request
            if choice.finish_reason is not None and end is None:
                result.stops.append(choice.handle)
        for end in outputs.finished:
            if (choice := self._choices.get(end.handle)) is not None:
                touched[choice.request.request_id] = choice.request
                result.aborts += self._end(choice, end)
        now = self._clock()
        for request in touched.values():
            if (update := self._update(request, now)) is not None:
                result.updates.append(update)
        return result

    def _rows(
        self, outputs: EngineOutputs
    ) -> Iterator[tuple[ChoiceState, list[int], SampleLogprobs]]:
        """The live sequences that got tokens, with one dict a token where logprobs came."""
        handles = outputs.handles.tolist()
        rows = outputs.token_ids.tolist()
        counts = None if outputs.counts is None else outputs.counts.tolist()
        dicts: dict[int, SampleLogprobs] = {}
        if outputs.logprobs is not None:
            found = position_dicts(outputs.logprobs, self._table)
            for row, position in zip(outputs.logprobs.rows.tolist(), found, strict=True):
                dicts.setdefault(row, []).append(position)
        for row, handle in enumerate(handles):
            choice = self._choices.get(handle)
            if choice is None or choice.finish_reason is not None:
                continue
            tokens = rows[row] if counts is None else rows[row][: counts[row]]
            yield choice, tokens, dicts.get(row, [])

    def _end(self, choice: ChoiceState, end: Finish) -> list[int]:
        """The engine ended a sequence. Returns what else must be aborted: an error is the whole
        request's."""
        request = choice.request
        request.metrics.num_preemptions += end.num_preemptions
        if end.reason != "error" or choice.finish_reason is not None:
            choice.finish(end.reason, end.stop_token)
            return []
        request.error = end.error or "the engine gave no reason"
        request.error_param, request.error_code = end.param, end.code
        running = [c for c in request.choices if c.finish_reason is None]
        for each in running:
            each.finish("error", None)
        return [each.handle for each in running if each is not choice]

    def _update(self, request: RequestState, now: float) -> RequestOutput | None:
        """The output to hand over, if there is one, and the end of what has ended."""
        for choice in request.choices:
            if choice.finish_reason is not None:
                self._choices.pop(choice.handle, None)
        update = request.update(now)
        if request.finished:
            self._requests.pop(request.request_id, None)
            self._queued.pop(request.request_id, None)
        return update
