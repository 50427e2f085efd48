"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import CompletionOutput, PromptLogprobs, RequestOutput
from octavo.server.contracts.tool_parser import Text
from octavo.server.http.large_body import MANY_MESSAGES
from octavo.server.openai.answer import (
    Answer,
    AnswerFormat,
    AnswerReader,
    Arguments,
    Begin,
    Event,
    Reasoning,
)
from octavo.server.openai.generation import ChunkedGeneration
from octavo.server.openai.protocol.chat import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatResponse,
    Delta,
    FunctionDelta,
    MadeToolCall,
    TemplateFields,
    ToolCallDelta,
)
from octavo.server.openai.protocol.common import Usage
from octavo.server.openai.state import ServerState
from octavo.server.openai.tokens import TokenTexts, chat_logprobs, hides_last, prompt_logprobs

ROLE = "assistant"


async def render(state: ServerState, body: TemplateFields) -> str:
    """The text that the chat template makes of a conversation."""
    trusted = state.config.server.trust_request_chat_template
    arguments = body.template_arguments(trust_template=trusted)
    messages = await state.threads.if_large(
        len(body.messages) > MANY_MESSAGES, lambda: [each.for_template() for each in body.messages]
    )
    return await state.renderers.render(messages, arguments)


class ChatGeneration(ChunkedGeneration[ChatRequest]):
    """Answers one conversation."""

    request = ChatRequest
    prefix = "chatcmpl-"

    def __init__(self, state: ServerState, body: ChatRequest, **facts: Any) -> None:
        super().__init__(state, body, **facts)
        self._texts = TokenTexts(
            state.llm.tokenizer,
            as_ids=body.return_tokens_as_token_ids,
            hide_special=body.skip_special_tokens,
        )
        self._prompt_logprobs: PromptLogprobs = []
        self._readers: dict[int, AnswerReader] = {}

    def sampling_params(self) -> SamplingParams:
        body = self.body
        params = body.sampling_params(self.state.defaults)
        self._format = AnswerFormat(
            self.state.parsers,
            body.tools or (),
            body.choice,
            parallel=body.parallel_tool_calls,
            structured=params.structured_outputs is not None,
        )
        return self._format.adjusted(params, self.state.llm.tokenizer)

    async def given_prompts(self) -> list[str | list[int]]:
        return [await render(self.state, self.body)]

    @property
    def add_special_tokens(self) -> bool:
        return self.body.add_special_tokens

    def add_prompt(self, prompt: int, output: RequestOutput) -> None:
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = self._prompt_logprobs or output.prompt_logprobs

    def chunks(self, prompt: int, output: RequestOutput) -> list[ChatChunk]:
        chunks = []
        for choice in output.outputs:
            reader = self._readers.get(choice.index)
            if reader is None:
                reader = self._readers[choice.index] = self._reader()
                chunks.append(self._opening(choice.index))
            delta = self._delta(reader.feed(choice.text, choice.finish_reason))
            if delta.model_fields_set or self.has_more(choice) or self.body.return_token_ids:
                chunks.append(self._chunk([self._chunk_choice(choice, delta, reader)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Mapping[tuple[int, int], CompletionOutput]) -> ChatResponse:
        response = ChatResponse(
            id=self.answer_id,
            object="chat.completion",
            created=self.created,
            model=self.model,
            choices=[self._choice(index, choice) for (_, index), choice in choices.items()],
            usage=self.usage(),
        )
        if self.body.prompt_logprobs is not None:
            response.prompt_logprobs = prompt_logprobs(
                self._prompt_logprobs, self.state.llm.tokenizer
            )
        if self.body.return_token_ids:
            response.prompt_token_ids = self.prompts[0].token_ids
        return response

    def _reader(self) -> AnswerReader:
        return self._format.reader(self.prompts[0].prompt or "", self.body.continued)

    def _choice(self, index: int, choice: CompletionOutput) -> ChatChoice:
        reader, answer = self._reader(), Answer()
        answer.add(reader.feed(choice.text, choice.finish_reason))
        item = ChatChoice(
            index=index,
            message=self._message(answer),
            logprobs=self._logprobs(choice),
            finish_reason=reader.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
        )
        if self.body.return_token_ids:
            item.token_ids = list(choice.token_ids)
        return item

    def _message(self, answer: Answer) -> ChatMessage:
        content = None if answer.calls and not answer.content else answer.content
        message = ChatMessage(role=ROLE, content=content, refusal=None)
        if self._format.reads_reasoning and self.body.include_reasoning:
            message.reasoning_content = answer.reasoning or None
        if answer.calls:
            message.tool_calls = [
                MadeToolCall(
                    id=call.id,
                    type="function",
                    function=CalledFunction(name=call.name, arguments=call.arguments),
                )
                for call in answer.calls
            ]
        return message

    def _delta(self, events: Sequence[Event]) -> Delta:
        """The events as one delta, a call's in one entry."""
        delta = Delta()
        calls: dict[int, ToolCallDelta] = {}
        for each in events:
            match each:
                case Reasoning() if self.body.include_reasoning:
                    delta.reasoning_content = (delta.reasoning_content or "") + each.text
                case Text():
                    delta.content = (delta.content or "") + each.text
                case Begin():
                    calls[each.index] = ToolCallDelta(
                        index=each.index,
                        id=each.id,
                        type="function",
                        function=FunctionDelta(name=each.name, arguments=""),
                    )
                case Arguments():
                    empty = ToolCallDelta(index=each.index, function=FunctionDelta())
                    function = calls.setdefault(each.index, empty).function
                    function.arguments = (function.arguments or "") + each.text
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _opening(self, index: int) -> ChatChunk:
        """The role, once a choice."""
        delta = Delta(role=ROLE, content="")
        chunk = self._chunk(
            [ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)]
        )
        if self.body.return_token_ids:
            chunk.prompt_token_ids = self.prompts[0].token_ids
        return chunk

    def _chunk_choice(
        self, choice: CompletionOutput, delta: Delta, reader: AnswerReader
    ) -> ChatChunkChoice:
        item = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(choice),
            finish_reason=reader.finish_reason(choice.finish_reason),
        )
        if choice.finish_reason is not None:
            item.stop_reason = choice.stop_reason
        if self.body.return_token_ids:
            item.token_ids = list(choice.token_ids)
        return item

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self.answer_id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.model,
            choices=choices,
        )

    def _logprobs(self, choice: CompletionOutput) -> ChatLogprobs | None:
        count = self.body.num_logprobs
        if count is None:
            return None
        return chat_logprobs(
            choice.token_ids,
            choice.logprobs or (),
            count,
            self._texts,
            hide_last=hides_last(self.body, choice.finish_reason, choice.stop_reason),
        )
