"""`POST /v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.core.sampling_params import SamplingParams
from octavo.frontend.outputs import CompletionOutput, RequestOutput
from octavo.server.http.errors import ApiError
from octavo.server.http.large_body import MANY_MESSAGES
from octavo.server.openai.answer import AnswerFormat, AnswerReader
from octavo.server.openai.generation import Generation
from octavo.server.openai.protocol.chat import TokenLogprob
from octavo.server.openai.protocol.responses import (
    FailedBecause,
    IncompleteBecause,
    InputDetails,
    OutputDetails,
    ResponsesAnswer,
    ResponsesEvent,
    ResponsesRequest,
    ResponsesUsage,
)
from octavo.server.openai.response_items import ItemEvent, Items
from octavo.server.openai.responses_input import to_messages
from octavo.server.openai.state import ServerState
from octavo.server.openai.tokens import TokenTexts, chat_logprobs, hides_last


class ResponseGeneration(Generation[ResponsesRequest]):
    """Answers one list of items."""

    request = ResponsesRequest
    prefix = "resp_"

    def __init__(self, state: ServerState, body: ResponsesRequest, **facts: Any) -> None:
        super().__init__(state, body, **facts)
        self._texts = TokenTexts(
            state.llm.tokenizer, as_ids=False, hide_special=body.skip_special_tokens
        )
        self._items = Items()
        self._reader: AnswerReader | None = None
        self._finish_reason: str | None = None
        self._number = 0

    def sampling_params(self) -> SamplingParams:
        body = self.body
        params = body.sampling_params(self.state.defaults)
        self._format = AnswerFormat(
            self.state.parsers,
            body.chat_tools(),
            body.choice,
            parallel=body.parallel_tool_calls,
            structured=params.structured_outputs is not None,
        )
        if body.num_logprobs is not None and self._format.reads_something:
            raise ApiError(
                "include: logprobs cannot be combined with tool calls or a reasoning parser",
                param="include",
                code="invalid_value",
            )
        return self._format.adjusted(params, self.state.llm.tokenizer)

    async def given_prompts(self) -> list[str | list[int]]:
        state, body = self.state, self.body
        arguments = {
            "tools": [tool.for_template() for tool in body.chat_tools()] or None,
            "add_generation_prompt": True,
            "continue_final_message": False,
            "chat_template_kwargs": body.template_variables,
        }
        many = len(body.input) > MANY_MESSAGES and not isinstance(body.input, str)
        messages = await state.threads.if_large(many, lambda: to_messages(body))
        return [await state.renderers.render(messages, arguments)]

    def answer(self, choices: Mapping[tuple[int, int], CompletionOutput]) -> ResponsesAnswer:
        (choice,) = choices.values()
        for _ in self._read(choice):
            pass
        for _ in self._items.finish(self._status):
            pass
        return self._response(self._status)

    def events(self, prompt: int, output: RequestOutput) -> bytes:
        found: list[ItemEvent] = []
        if self._number == 0:
            found.append(("response.created", {"response": self._response("in_progress")}))
            found.append(("response.in_progress", {"response": self._response("in_progress")}))
        data = self._encoded(found)
        for choice in output.outputs:
            data += self._encoded(self._read(choice))
        return data

    def last_events(self) -> bytes:
        data = self._encoded(self._items.finish(self._status))
        response = self._response(self._status)
        return data + self._encoded([(f"response.{self._status}", {"response": response})])

    def error_event(self, error: ApiError) -> bytes:
        data = self._encoded(self._items.close("incomplete"))
        response = self._response("failed")
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        response.error = FailedBecause(code=code, message=error.message)
        return data + self._encoded([("response.failed", {"response": response})])

    def _read(self, choice: CompletionOutput) -> Iterable[ItemEvent]:
        if self._reader is None:
            self._reader = self._format.reader(self.prompts[0].prompt or "", "")
        self._finish_reason = choice.finish_reason
        events = self._reader.feed(choice.text, choice.finish_reason)
        return self._items.add(events, self._logprobs(choice))

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _encoded(self, events: Iterable[ItemEvent]) -> bytes:
        data = b""
        for kind, what in events:
            event = ResponsesEvent(type=kind, sequence_number=self._number, **what)
            self._number += 1
            data += b"event: " + kind.encode() + b"\ndata: " + event.encode() + b"\n\n"
        return data

    def _response(self, status: str) -> ResponsesAnswer:
        body, params = self.body, self.prompts[0].sampling
        ended = status != "in_progress"
        text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
        choice = body.choice
        named = {"type": "function", "name": choice.name}
        return ResponsesAnswer(
            id=self.answer_id,
            object="response",
            created_at=self.created,
            completed_at=int(time.time()) if status == "completed" else None,
            status=status,  # type: ignore[arg-type]
            background=False,
            error=None,
            incomplete_details=IncompleteBecause(reason="max_output_tokens")
            if status == "incomplete"
            else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self.model,
            output=list(self._items.items) if ended else [],
            parallel_tool_calls=body.parallel_tool_calls,
            previous_response_id=None,
            reasoning=_reasoning(body),
            service_tier="default",
            store=False,
            temperature=params.temperature,
            text={"format": {"type": "text"}} | text,
            tool_choice=named if choice.name is not None else _mode(body),
            tools=[dict(tool) for tool in body.tools or ()],
            top_logprobs=body.top_logprobs or 0,
            top_p=params.top_p,
            truncation="disabled",
            usage=self._token_usage() if ended else None,
            user=body.user,
        )

    def _token_usage(self) -> ResponsesUsage:
        usage = self.usage()
        details = usage.prompt_tokens_details
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=0 if details is None else details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self._reasoning_tokens()),
            total_tokens=usage.total_tokens,
        )

    def _reasoning_tokens(self) -> int:
        text = self._items.reasoning
        encode = self.state.llm.tokenizer.encode
        return len(encode(text, add_special_tokens=False)) if text else 0

    def _logprobs(self, choice: CompletionOutput) -> list[TokenLogprob]:
        count = self.body.num_logprobs
        if count is None:
            return []
        return chat_logprobs(
            choice.token_ids,
            choice.logprobs or (),
            count,
            self._texts,
            hide_last=hides_last(self.body, choice.finish_reason, choice.stop_reason),
        ).content


def _reasoning(body: ResponsesRequest) -> dict[str, str | None]:
    given = body.reasoning
    if given is None:
        return {"effort": None, "summary": None}
    return {"effort": given.effort, "summary": given.summary}


def _mode(body: ResponsesRequest) -> str:
    """The choice among the tools, as answers tell it."""
    return body.tool_choice if isinstance(body.tool_choice, str) else "auto"
