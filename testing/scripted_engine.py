"""An engine without a scheduler or a model, for tests of front ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from octavo.core.messages import EngineOutputs, EngineRequest, Finish, Logprobs, PromptLogprobs

Reply = Callable[[EngineRequest], Sequence[int]]


class ScriptedEngine:
    """Answers every request with the tokens of `reply`, `width` of them a step at most.

    A sequence ends at an end token, a stop token, max_tokens, or (reason `length`) when the reply
    is used up. `refuse` returns the exception that `add` raises, `fail` the message with which a
    sequence ends in its first step. `before_step` is called in every step and may raise.
    """

    report: Any = None

    def __init__(
        self,
        reply: Reply | None = None,
        *,
        width: int = 1,
        max_running: int = 64,
        vocab_size: int = 256,
        refuse: Callable[[EngineRequest], Exception | None] = lambda request: None,
        fail: Callable[[EngineRequest], str | None] = lambda request: None,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.width, self.max_running, self.vocab_size = width, max_running, vocab_size
        self.reply = reply or self.random_reply
        self.refuse, self.fail, self.before_step = refuse, fail, before_step
        self.requests: dict[int, EngineRequest] = {}  # live, by handle
        self.seen: list[EngineRequest] = []
        self.aborted: list[int] = []
        self.steps = 0
        self.closed = False
        self._left: dict[int, list[int]] = {}
        self._made: dict[int, int] = {}
        self._started: set[int] = set()
        self._ended: list[Finish] = []

    def random_reply(self, request: EngineRequest) -> list[int]:
        """Tokens that depend on the prompt, the seed and the choice only."""
        source = random.Random(f"{request.token_ids.tolist()} {request.seed} {request.index}")
        return [source.randrange(self.vocab_size) for _ in range(request.max_tokens)]

    def add(self, request: EngineRequest) -> None:
        error = self.refuse(request)
        if error is not None:
            raise error
        assert request.handle not in self.requests, "handle is live already"
        self.seen.append(request)
        self.requests[request.handle] = request
        self._left[request.handle] = list(self.reply(request))
        self._made[request.handle] = 0

    def abort(self, handles: Sequence[int], reason: str = "abort") -> None:
        for handle in handles:
            if handle in self.requests:
                self.aborted.append(handle)
                self._end(handle, reason)

    def has_work(self) -> bool:
        return bool(self.requests or self._ended)

    def step(self) -> EngineOutputs | None:
        self.before_step(self.steps)
        self.steps += 1
        rows: list[tuple[EngineRequest, list[int]]] = []
        cached: dict[int, int] = {}
        prompts: list[PromptLogprobs] = []
        for handle, request in list(self.requests.items())[: self.max_running]:
            if handle not in self._started:
                self._started.add(handle)
                cached[handle] = 0
                if request.sampling.prompt_logprobs is not None:
                    prompts.append(_prompt_logprobs(request))
            message = self.fail(request)
            if message is not None:
                self._end(handle, "error", error=message)
                continue
            tokens = self._next(request)
            if tokens:
                rows.append((request, tokens))
        finished, self._ended = self._ended, []
        counts = np.array([len(tokens) for _, tokens in rows], np.int32)
        table = np.zeros((len(rows), self.width), np.int32)
        for row, (_, tokens) in enumerate(rows):
            table[row, : len(tokens)] = tokens
        return EngineOutputs(
            step=self.steps,
            handles=np.array([request.handle for request, _ in rows], np.int64),
            token_ids=table,
            counts=counts,
            finished=finished,
            cached=cached,
            logprobs=_logprobs(rows, self.vocab_size),
            prompt_logprobs=prompts,
        )

    def metrics(self) -> dict[str, Any]:
        return {"steps": self.steps, "num_running": len(self.requests)}

    def query(self, name: str, *args: Any) -> Any:
        answers: dict[str, Any] = {
            "overview": {"now": 0.0, "blocks": None, "live": [], "recent": []},
            "timeline": None,
        }
        return answers[name]

    def reset_prefix_cache(self) -> bool:
        return not self.requests

    def close(self) -> None:
        self.closed = True

    def _next(self, request: EngineRequest) -> list[int]:
        tokens: list[int] = []
        left, sampling = self._left[request.handle], request.sampling
        while left and len(tokens) < self.width:
            token = left.pop(0)
            tokens.append(token)
            self._made[request.handle] += 1
            if self._made[request.handle] > sampling.min_tokens:
                if token in request.eos_token_ids and not sampling.ignore_eos:
                    self._end(request.handle, "stop")
                    return tokens
                if token in (sampling.stop_token_ids or ()):
                    self._end(request.handle, "stop", stop_token=token)
                    return tokens
            if self._made[request.handle] >= request.max_tokens:
                break
        if not left or self._made[request.handle] >= request.max_tokens:
            self._end(request.handle, "length")
        return tokens

    def _end(self, handle: int, reason: str, **more: Any) -> None:
        # In this order: seen from another thread, there is work all the time.
        self._ended.append(Finish(handle=handle, reason=reason, **more))
        del self.requests[handle]


def _columns(tokens: Sequence[int], num: Sequence[int], vocab_size: int) -> Logprobs:
    """Token t has log probability -t / 100 and rank t + 1; the alternatives are tokens 0, 1, ..."""
    width = max(num)
    ids = np.array([[token, *range(width)] for token in tokens], np.int32)
    return Logprobs(
        rows=np.arange(len(tokens), dtype=np.int32),
        token_ids=ids.reshape(len(tokens), 1 + width),
        values=(ids / -100).astype(np.float32),
        ranks=np.array([token + 1 for token in tokens], np.int32),
        num=np.array(num, np.int32),
    )


def _logprobs(rows: Sequence[tuple[EngineRequest, list[int]]], vocab_size: int) -> Logprobs | None:
    wanted = [
        (row, token, request.sampling.logprobs)
        for row, (request, tokens) in enumerate(rows)
        for token in tokens
        if request.sampling.logprobs is not None
    ]
    if not wanted:
        return None
    num = [vocab_size if count == -1 else count or 0 for _, _, count in wanted]
    columns = _columns([token for _, token, _ in wanted], num, vocab_size)
    columns.rows = np.array([row for row, _, _ in wanted], np.int32)
    return columns


def _prompt_logprobs(request: EngineRequest) -> PromptLogprobs:
    tokens = request.token_ids.tolist()[1:]
    num = request.sampling.prompt_logprobs or 0
    empty = np.empty((0, 1 + num))
    columns = (
        _columns(tokens, [num] * len(tokens), 0)
        if tokens
        else Logprobs(
            rows=np.empty(0, np.int32),
            token_ids=empty.astype(np.int32),
            values=empty.astype(np.float32),
            ranks=np.empty(0, np.int32),
            num=np.empty(0, np.int32),
        )
    )
    return PromptLogprobs(handle=request.handle, start=1, logprobs=columns)
