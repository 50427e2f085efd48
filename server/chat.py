"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from octavo.server.endpoint import has_news
from octavo.server.engine import Choice, Output, TokenLogprob
from octavo.server.generation import Collected, Job, Prompt, hides_last
from octavo.server.protocol.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Delta,
    TemplateFields,
)
from octavo.server.protocol.common import Usage
from octavo.server.state import ServerState
from octavo.server.tokens import TokenTexts, chat_logprobs, prompt_logprobs

ROLE = "assistant"


class Chat:
    """The endpoint."""

    request = ChatRequest
    prefix = "chatcmpl"

    async def prompts(self, state: ServerState, body: ChatRequest) -> list[Prompt]:
        return [await render(state, body)]

    def writer(self, state: ServerState, job: Job) -> ChatWriter:
        return ChatWriter(state, job)


async def render(state: ServerState, body: TemplateFields) -> Prompt:
    """The prompt that the chat template makes of a conversation."""
    arguments = body.template_arguments()
    messages = [message.for_template() for message in body.messages]
    rendered = await state.llm.render_chat(messages, **arguments)
    text, token_ids = rendered["prompt"], rendered["prompt_token_ids"]
    if body.add_special_tokens:
        token_ids = await asyncio.to_thread(state.llm.inputs.encode, text)
    return Prompt(token_ids, text)


class ChatWriter:
    """Writes the choices of one conversation."""

    def __init__(self, state: ServerState, job: Job) -> None:
        assert isinstance(job.body, ChatRequest), "a chat job"
        self._state, self._job, self._body = state, job, job.body
        self._texts = TokenTexts(
            state.llm.tokenizer,
            as_ids=job.body.return_tokens_as_token_ids,
            hide_special=job.body.skip_special_tokens,
        )
        self._prompt_entries: Sequence[Mapping[int, TokenLogprob] | None] = ()
        self._begun: set[int] = set()

    def add_prompt(self, prompt: int, output: Output) -> None:
        if output.prompt_logprobs is not None and not self._prompt_entries:
            self._prompt_entries = output.prompt_logprobs

    def chunks(self, prompt: int, output: Output) -> list[ChatChunk]:
        chunks = []
        for choice in output.outputs:
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                chunks.append(self._opening(choice.index))
            if has_news(choice) or self._body.return_token_ids:
                chunks.append(self._chunk([self._chunk_choice(choice)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Mapping[tuple[int, int], Collected], usage: Usage) -> ChatResponse:
        job = self._job
        response = ChatResponse(
            id=job.answer_id,
            object="chat.completion",
            created=job.created,
            model=job.model,
            choices=[self._choice(index, choice) for (_, index), choice in choices.items()],
            usage=usage,
        )
        if self._body.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(
                self._prompt_entries, self._state.llm.tokenizer
            )
        if self._body.return_token_ids:
            response.prompt_token_ids = job.prompts[0].token_ids
        return response

    def _choice(self, index: int, choice: Collected) -> ChatChoice:
        item = ChatChoice(
            index=index,
            message=ChatMessage(role=ROLE, content="".join(choice.text), refusal=None),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            item.token_ids = list(choice.token_ids)
        return item

    def _opening(self, index: int) -> ChatChunk:
        """The role, once a choice."""
        delta = Delta(role=ROLE, content="")
        chunk = self._chunk(
            [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)]
        )
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._job.prompts[0].token_ids
        return chunk

    def _chunk_choice(self, choice: Choice) -> ChatChunkChoice:
        item = ChatChunkChoice(
            index=choice.index,
            delta=Delta(content=choice.text) if choice.text else Delta(),
            logprobs=self._logprobs(choice),
            finish_reason=choice.finish_reason,
        )
        if choice.finish_reason is not None:
            item.stop_reason = choice.stop_reason
        if self._body.return_token_ids:
            item.token_ids = list(choice.token_ids)
        return item

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        job = self._job
        return ChatChunk(
            id=job.answer_id,
            object="chat.completion.chunk",
            created=job.created,
            model=job.model,
            choices=choices,
        )

    def _logprobs(self, choice: Choice | Collected) -> ChatLogprobs | None:
        count = self._body.num_logprobs
        if count is None:
            return None
        return chat_logprobs(
            choice.token_ids,
            choice.logprobs or (),
            count,
            self._texts,
            hide_last=hides_last(self._body, choice.finish_reason, choice.stop_reason),
        )
