"""A fake `AsyncLLM`: a tokenizer whose tokens are bytes, and answers that the prompt chooses.

The last line of the prompt decides: `say:TEXT` is answered with TEXT and an end token, `tell:JSON`
with the text that is written as a JSON string; `slow` with
one token every few milliseconds, for ever; `fail:N` breaks after N tokens; `row-error` is refused
by the engine in the third step, `refuse` before the first; anything else is answered with ANSWER.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.core.contracts.tokenizer import Tokenizer
from octavo.core.errors import RequestError, RequestFault
from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.frontend.text.inputs import InputProcessor, PreparedRequest
from octavo.server.openai.answer import AnswerParsers

Choice = CompletionOutput

ANSWER = "Grüße 😀, ok."
BOS, EOS, END = 256, 257, 258
VOCAB = 259
SPECIALS = {BOS: "<s>", EOS: "</s>", END: "<|end|>"}


class ByteTokenizer(Tokenizer):
    eos_token_ids = (EOS, END)
    bos_token_id = BOS
    vocab_size = VOCAB
    special_ids = frozenset(SPECIALS)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [t for t in token_ids if not (skip_special_tokens and t in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return SPECIALS[token_id].encode() if token_id in SPECIALS else bytes([token_id])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        if any(message["role"] == "wizard" for message in messages):
            raise RequestError("the template says: no wizards", param="messages")
        lines = [f"{message['role']}\n{text(message['content'])}" for message in messages]
        if tools:
            lines.insert(0, f"tools: {len(tools)}")
        if kwargs:
            lines.insert(0, f"kwargs: {sorted(kwargs.items())}")
        ending = "" if continue_final_message else "\n"
        return "\n".join(lines) + ending + ("assistant\n" if add_generation_prompt else "")


def text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@dataclass
class Call:
    """What the server asked of the engine."""

    prompt: dict[str, Any]
    params: SamplingParams
    request_id: str
    priority: int
    user: str | None
    cache_salt: str | None


FAR_TOO_LONG = 2000
"""Longer texts are not tokenized to be refused."""


class Inputs(InputProcessor):
    characters = 0
    """So many have been tokenized."""

    def fewest_tokens(self, text: str) -> int:
        return len(text) if len(text) > FAR_TOO_LONG else 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@dataclass
class FakeAsyncLLM:
    max_model_len: int = 256
    pool: int | None = None
    start_delay: float = 0.0
    start_error: Exception | None = None
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    calls: list[Call] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    conversations: list[Any] = field(default_factory=list)
    closed: bool = False
    dead_reason: str | None = None
    num_queued: int = 0
    num_queued_tokens: int = 0

    def __post_init__(self) -> None:
        self.inputs = Inputs(
            self.tokenizer,
            max_model_len=self.max_model_len,
            generation_config={"temperature": 0.6},
        )
        self.inputs.max_sequence_tokens = min(self.pool or self.max_model_len, self.max_model_len)

    async def start(self) -> None:
        await asyncio.sleep(self.start_delay)
        if self.start_error:
            raise self.start_error

    async def shutdown(self) -> None:
        self.closed = True

    def default_sampling_params(self) -> SamplingParams:
        return self.inputs.default_sampling_params()

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def overview(self, cells: int = 1024, requests: int = 32) -> dict[str, Any]:
        blocks = {"counts": [2, 1, 1, 1], "per_cell": 1, "cells": "01230"}
        return {"now": 0.0, "blocks": blocks, "live": [], "recent": []}

    async def timeline(self, request_id: str) -> list[dict[str, Any]] | None:
        return [{"at": 0.0, "event": "queued"}] if request_id == "known" else None

    async def reset_prefix_cache(self) -> bool:
        return True

    async def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        self.conversations.append(messages)
        return self.tokenizer.chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            kwargs=chat_template_kwargs,
        )

    async def stream(self, prepared: PreparedRequest) -> AsyncIterator[RequestOutput]:
        request, request_id, ids = prepared.requests[0], prepared.request_id, prepared.token_ids
        assert all(request_id != call.request_id for call in self.calls), "ids are unique"
        params = msgspec.structs.replace(prepared.sampling, max_tokens=request.max_tokens)
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if prepared.prompt is not None:
            prompt["prompt"] = prepared.prompt
        salt = request.extra_keys[0].decode().removeprefix("salt:") if request.extra_keys else None
        self.calls.append(Call(prompt, params, request_id, request.priority, request.user, salt))

        def output(outputs: list[Choice], finished: bool) -> RequestOutput:
            return RequestOutput(request_id, prepared.prompt, ids, first, outputs, finished)

        line = self._command(self.tokenizer.decode(ids))
        if line == "refuse":
            raise RequestError("the pool is too small", param="prompt", code="capacity")
        reply = self._reply(line)
        streams = [_Stream(index, params) for index in range(params.n)]
        first: Any = None
        if params.prompt_logprobs is not None:
            first = [None, *(logprobs(token, params.prompt_logprobs) for token in ids[1:])]
        if prepared.sampling.max_tokens == 0:
            scored = [Choice(s.index, "", [], finish_reason="length") for s in streams]
            yield output(scored, True)
            return
        for step in range(request.max_tokens):
            if line == "slow":
                await asyncio.sleep(0.005)
            if request_id in self.aborted:
                choices = [Choice(s.index, "", [], finish_reason="abort") for s in streams]
                yield output(choices, True)
                return
            if line.startswith("fail:") and step == int(line[5:]):
                raise RuntimeError("the engine's own trouble")
            if line == "row-fault" and step == 2:
                raise RequestFault("logits processor 'bad' failed: ValueError: boom")
            if line == "row-error" and step == 2:
                raise RequestError("no token can be sampled")
            token = reply[step] if step < len(reply) else EOS
            if line == "slow":
                token = ord("z")
            outputs = [s.step(token) for s in streams if not s.ended]
            finished = all(s.ended for s in streams)
            update = output(outputs, finished)
            update.num_cached_tokens = 3
            yield update
            first = None
            if finished:
                return

    @staticmethod
    def _command(text: str) -> str:
        lines = [line for line in text.splitlines() if line and line != "assistant"]
        return lines[-1] if lines else ""

    @staticmethod
    def _reply(line: str) -> list[int]:
        text = line[4:] if line.startswith("say:") else ANSWER
        if line.startswith("tell:"):
            text = json.loads(line[5:])
        return list(text.encode())


class _Stream:
    def __init__(self, index: int, params: SamplingParams) -> None:
        self.index, self.params, self.count, self.ended = index, params, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> Choice:
        self.count += 1
        at_end = token in (EOS, END) and not self.params.ignore_eos
        finish = "stop" if at_end else None
        if finish is None and self.count == self.params.max_tokens:
            finish = "length"
        self.ended = finish is not None
        text = "" if token in SPECIALS else self._decoder.decode(bytes([token]), final=self.ended)
        chosen = None
        if self.params.logprobs is not None:
            chosen = [logprobs(token, self.params.logprobs)]
        return Choice(self.index, text, [token], logprobs=chosen, finish_reason=finish)


def logprobs(token: int, count: int) -> dict[int, Logprob]:
    """The chosen token is the second most probable; the best one is minus infinity's opposite."""
    entries = {token: Logprob(math.log(0.25), 2)}
    for rank in range(1, count + 1):
        if rank != 2:
            other = (token + rank) % 256
            value = math.log(0.5) if rank == 1 else -math.inf if rank > 3 else math.log(0.1)
            entries[other] = Logprob(value, rank)
    return entries
