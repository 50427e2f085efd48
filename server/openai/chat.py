"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from octavo.core.sampling_params import SamplingParams
from octavo.server.contracts.tool_parser import Text
from octavo.server.http.endpoint import DataEvents, has_more
from octavo.server.http.large_body import MANY_MESSAGES
from octavo.server.http.state import ServerState
from octavo.server.openai.answer import (
    Answer,
    AnswerReader,
    Arguments,
    Begin,
    Event,
    Plan,
    Reasoning,
)
from octavo.server.openai.generation import GivenPrompt, GivenText, Job, hides_last
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
from octavo.server.openai.tokens import TokenTexts, chat_logprobs, prompt_logprobs
from octavo.server.process.engine import Choice, Output, TokenLogprob

ROLE = "assistant"


class Chat:
    """The endpoint."""

    request = ChatRequest
    prefix = "chatcmpl-"

    def params(self, state: ServerState, body: ChatRequest) -> SamplingParams:
        params = body.sampling_params(state.defaults, state.llm.inputs.vocab_size)
        return plan_for(state, body, params).adjusted(params, state.llm.tokenizer)

    async def prompts(self, state: ServerState, body: ChatRequest) -> list[GivenPrompt]:
        return [GivenText(await render(state, body), body.add_special_tokens)]

    def writer(self, state: ServerState, job: Job) -> ChatWriter:
        return ChatWriter(state, job)


def plan_for(state: ServerState, body: ChatRequest, params: SamplingParams) -> Plan:
    """What the answers of a chat are read with."""
    return Plan(
        state.llm.inputs.parsers,
        body.tools or (),
        body.choice,
        parallel=body.parallel_tool_calls,
        structured=params.structured_outputs is not None,
    )


async def render(state: ServerState, body: TemplateFields) -> str:
    """The text that the chat template makes of a conversation."""
    trusted = state.config.server.trust_request_chat_template
    arguments = body.template_arguments(trust_template=trusted)
    messages = await state.threads.if_large(
        len(body.messages) > MANY_MESSAGES, lambda: [each.for_template() for each in body.messages]
    )
    return await state.chats.render(messages, arguments)


class ChatWriter(DataEvents):
    """Writes the choices of one conversation."""

    def __init__(self, state: ServerState, job: Job) -> None:
        assert isinstance(job.body, ChatRequest), "a chat job"
        super().__init__(job)
        self._state, self._body = state, job.body
        self._plan = plan_for(state, job.body, job.params[0])
        self._texts = TokenTexts(
            state.llm.tokenizer,
            as_ids=job.body.return_tokens_as_token_ids,
            hide_special=job.body.skip_special_tokens,
        )
        self._prompt_entries: Sequence[Mapping[int, TokenLogprob] | None] = ()
        self._readers: dict[int, AnswerReader] = {}

    def add_prompt(self, prompt: int, output: Output) -> None:
        if output.prompt_logprobs is not None and not self._prompt_entries:
            self._prompt_entries = output.prompt_logprobs

    def chunks(self, prompt: int, output: Output) -> list[ChatChunk]:
        chunks = []
        for choice in output.outputs:
            reader = self._readers.get(choice.index)
            if reader is None:
                reader = self._readers[choice.index] = self._reader()
                chunks.append(self._opening(choice.index))
            delta = self._delta(reader.feed(choice.text, choice.finish_reason))
            if delta.model_fields_set or has_more(choice) or self._body.return_token_ids:
                chunks.append(self._chunk([self._chunk_choice(choice, delta, reader)]))
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        chunk = self._chunk([])
        chunk.usage = usage
        return chunk

    def answer(self, choices: Mapping[tuple[int, int], Choice], usage: Usage) -> ChatResponse:
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

    def _reader(self) -> AnswerReader:
        return self._plan.reader(self._job.prompts[0].text or "", self._body.continued)

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        reader, answer = self._reader(), Answer()
        answer.add(reader.feed(choice.text, choice.finish_reason))
        item = ChatChoice(
            index=index,
            message=self._message(answer),
            logprobs=self._logprobs(choice),
            finish_reason=reader.finish_reason(choice.finish_reason),
            stop_reason=choice.stop_reason,
        )
        if self._body.return_token_ids:
            item.token_ids = list(choice.token_ids)
        return item

    def _message(self, answer: Answer) -> ChatMessage:
        content = None if answer.calls and not answer.content else answer.content
        message = ChatMessage(role=ROLE, content=content, refusal=None)
        if self._plan.reads_reasoning and self._body.include_reasoning:
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
                case Reasoning() if self._body.include_reasoning:
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
        if self._body.return_token_ids:
            chunk.prompt_token_ids = self._job.prompts[0].token_ids
        return chunk

    def _chunk_choice(self, choice: Choice, delta: Delta, reader: AnswerReader) -> ChatChunkChoice:
        item = ChatChunkChoice(
            index=choice.index,
            delta=delta,
            logprobs=self._logprobs(choice),
            finish_reason=reader.finish_reason(choice.finish_reason),
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

    def _logprobs(self, choice: Choice) -> ChatLogprobs | None:
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
